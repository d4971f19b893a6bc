package routing

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
)

// tiny has the counts of one whole step: two ranks, one layer, two microbatches.
const (
	tinyHeader = `{"version":1,"ranks":2,"tokens":10,"top_k":2,"layers":1,"microbatches":2}` + "\n"
	tinyStep   = `{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":5}
{"step":0,"layer":0,"microbatch":0,"rank":1,"rows":15}
{"step":0,"layer":0,"microbatch":1,"rank":1,"rows":0}
{"step":0,"layer":0,"microbatch":1,"rank":0,"rows":20}
`
)

func TestRead(t *testing.T) {
	tr, err := Read(strings.NewReader(tinyHeader + tinyStep))
	if err != nil {
		t.Fatal(err)
	}
	if tr.Steps() != 1 || tr.Total() != 20 || tr.Balanced() != 10 || tr.Worst() != 20 || tr.Imbalance() != 2 {
		t.Errorf("%+v, %d steps, imbalance %g", tr.Header, tr.Steps(), tr.Imbalance())
	}
	for i, want := range []Rows{5, 15, 20, 0} {
		if got := tr.Rows(0, 0, i/2, i%2); got != want {
			t.Errorf("microbatch %d of rank %d has %d rows, want %d", i/2, i%2, got, want)
		}
	}
	// A missing newline after the last line, and empty lines, do no harm.
	if _, err := Read(strings.NewReader("\n" + tinyHeader + "\n" + strings.TrimSuffix(tinyStep, "\n"))); err != nil {
		t.Error(err)
	}
}

// Every error is one sentence that says what is wrong and where.
func TestReadRefuses(t *testing.T) {
	entry := func(s string) string { return tinyHeader + s + "\n" + tinyStep }
	for _, c := range []struct{ name, text, want string }{
		{"nothing", "", "the file of routing counts is empty"},
		{"blank", "\n \n", "the file of routing counts is empty"},
		{"header only", tinyHeader, "a header and no step"},
		{"no header", tinyStep, `line 1: header: unknown key "step"`},
		{"version", strings.Replace(tinyHeader, `n":1`, `n":2`, 1), "line 1: header: version is 2; this program reads version 1"},
		{"no ranks", strings.Replace(tinyHeader, `"ranks":2,`, "", 1), "line 1: header: ranks is missing"},
		{"zero ranks", strings.Replace(tinyHeader, `"ranks":2`, `"ranks":0`, 1), "line 1: header: ranks is 0"},
		{"many ranks", strings.Replace(tinyHeader, `"ranks":2`, `"ranks":18446744073709551617`, 1), "ranks is 18446744073709551617"},
		{"cut number", strings.Replace(tinyHeader, `"ranks":2`, `"ranks":4294967298`, 1), "ranks is 4294967298"},
		{"large", `{"version":1,"ranks":65536,"tokens":1,"top_k":1,"layers":65536,"microbatches":1}`, "numbers a step"},
		{"experts", strings.Replace(tinyHeader, `}`, `,"experts":3}`, 1), "multiple of the 2 ranks"},
		{"top_k", strings.Replace(tinyHeader, `"top_k":2`, `"top_k":5,"experts":4`, 1), "top_k is 5 of 4 experts"},
		{"unknown key", entry(`{"step":0,"layer":0,"microbatch":0,"rank":0,"rowz":5}`), `line 2: unknown key "rowz"; there are step, layer, microbatch, rank, rows`},
		{"other case", entry(`{"step":0,"layer":0,"microbatch":0,"rank":0,"Rows":5}`), `line 2: unknown key "Rows"`},
		{"missing key", entry(`{"step":0,"layer":0,"microbatch":0,"rows":5}`), "line 2: rank is missing"},
		{"key twice", entry(`{"step":0,"step":0,"layer":0,"microbatch":0,"rank":0,"rows":5}`), "line 2: step comes twice"},
		{"negative", entry(`{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":-5}`), "line 2: rows is -5; want a whole number of at least 0"},
		{"fraction", entry(`{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":1.5}`), "line 2: rows is 1.5"},
		{"text", entry(`{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":"5"}`), `line 2: rows is "5"; want a whole number`},
		{"object", entry(`{"step":{}}`), "line 2: step is an object; want a whole number of at least 0"},
		{"list", entry(`{"step":[]}`), "line 2: step is a list; want"},
		{"null", entry(`{"step":null}`), "line 2: step is null; want"},
		{"no name", entry(`{1:2}`), "line 2: expected a JSON object; it is not JSON from character 2 on"},
		{"no comma", entry(`{"step":0 "layer":1}`), "line 2: expected a JSON object; it is not JSON from character 11 on"},
		{"rank", entry(`{"step":0,"layer":0,"microbatch":0,"rank":2,"rows":5}`), "line 2: rank is 2; the header says there are 2"},
		{"too many rows", entry(`{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":21}`), "line 2: rows is 21; with 10 tokens a rank receives at most 20"},
		{"array", entry(`[1]`), "line 2: expected a JSON object, got another value"},
		{"garbage", entry("\x00"), "line 2: expected a JSON object; it is not JSON from character 1 on"},
		{"two on a line", entry(`{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":5} {}`), "line 2: something follows the object"},
		{"broken line", entry(`{"step":0,"layer":0`), "line 2: ends in the middle of an object"},
		{"cut off", strings.TrimSuffix(tinyHeader+tinyStep, "0}\n"), "line 5: is cut off; was the file written to its end?"},
		{"long line", tinyHeader + strings.Repeat(" ", 5000), "line 2 is longer than 4096 bytes"},
		{"duplicate", tinyHeader + tinyStep + tinyStep[:strings.Index(tinyStep, "\n")+1],
			"line 6: rank 0 of microbatch 0 of layer 0 of step 0 was given in line 2 already"},
		{"missing entry", tinyHeader + tinyStep[strings.Index(tinyStep, "\n")+1:], "rank 0 of microbatch 0 of layer 0 of step 0 is missing; line 2 is about a later one"},
		{"missing at the end", strings.TrimSuffix(tinyHeader+tinyStep, `{"step":0,"layer":0,"microbatch":1,"rank":0,"rows":20}`+"\n"), "rank 0 of microbatch 1 of layer 0 of step 0 is missing"},
		{"missing step", tinyHeader + tinyStep + strings.ReplaceAll(tinyStep, `"step":0`, `"step":2`), "rank 0 of microbatch 0 of layer 0 of step 1 is missing"},
		{"last missing", tinyHeader + tinyStep + `{"step":1,"layer":0,"microbatch":0,"rank":0,"rows":5}`, "rank 1 of microbatch 0 of layer 0 of step 1 is missing, and all after it"},
		{"sum", tinyHeader + strings.Replace(tinyStep, `"rows":15`, `"rows":14`, 1), "line 2: the rows of all ranks together, from rank 0 of microbatch 0 of layer 0 of step 0 on, are 19; 10 tokens times 2 are 20"},
	} {
		_, err := Read(strings.NewReader(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// A file that ends anywhere in its last line is cut off, whatever stands there.
func TestCutAnywhere(t *testing.T) {
	whole := strings.TrimSuffix(tinyHeader+tinyStep, "\n")
	for n := strings.LastIndexByte(whole, '\n') + 2; n < len(whole); n++ {
		if _, err := Read(strings.NewReader(whole[:n])); err == nil || !strings.HasSuffix(err.Error(), "line 5: is cut off; was the file written to its end?") {
			t.Errorf("%q: %v", whole[n-1:n], err)
		}
	}
}

// broken is a reader that fails after some bytes.
type broken struct{ text string }

func (b *broken) Read(p []byte) (int, error) {
	if b.text == "" {
		return 0, errors.New("the disk is gone")
	}
	n := copy(p, b.text)
	b.text = b.text[n:]
	return n, nil
}

func (b *broken) Write([]byte) (int, error) { return 0, errors.New("the disk is gone") }

func TestDiskErrors(t *testing.T) {
	_, err := Read(&broken{tinyHeader})
	if want := "cannot read line 2: the disk is gone"; fmt.Sprint(err) != want {
		t.Errorf("%v, want %s", err, want)
	}
	tr, err := Read(strings.NewReader(tinyHeader + tinyStep))
	if err != nil {
		t.Fatal(err)
	}
	if err := Write(&broken{}, tr); err == nil {
		t.Error("the error of a write is lost")
	}
}

// Written counts are read back unchanged.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr, err := Generate(anyConfig(t))
		if err != nil {
			t.Fatal(err)
		}
		if rapid.Bool().Draw(t, "experts unknown") {
			tr.Experts = 0
		}
		var file bytes.Buffer
		if err := Write(&file, tr); err != nil {
			t.Fatal(err)
		}
		back, err := Read(&file)
		if err != nil {
			t.Fatal(err)
		}
		if back.Header != tr.Header || fmt.Sprint(back.rows) != fmt.Sprint(tr.rows) {
			t.Fatalf("%+v came back as %+v", tr, back)
		}
	})
}

func TestRowsRefuses(t *testing.T) {
	tr, err := Read(strings.NewReader(tinyHeader + tinyStep))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if recover() == nil {
			t.Error("rank 2 of 2 was given")
		}
	}()
	tr.Rows(0, 0, 0, 2)
}

// Counts that are read are complete, and reading them again gives the same.
func FuzzRead(f *testing.F) {
	f.Add([]byte(tinyHeader + tinyStep))
	f.Add([]byte(tinyHeader))
	f.Add([]byte(strings.Replace(tinyHeader, "}", `,"experts":4}`, 1) + strings.TrimSuffix(tinyStep, "0}\n")))
	f.Add([]byte(`{"version":1,"ranks":1,"tokens":1,"top_k":1,"layers":1,"microbatches":1}` + "\n" + `{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		defer inputtest.Bound(t, len(text))()
		tr, err := Read(bytes.NewReader(text))
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("no sentence: %q", err)
			}
			return
		}
		if tr.check() != nil || tr.Steps() < 1 || tr.Steps() > bytes.Count(text, []byte("\n"))+1 {
			t.Fatalf("%+v of %d steps", tr.Header, tr.Steps())
		}
		if err := whole(tr); err != nil {
			t.Fatal(err)
		}
		var file bytes.Buffer
		if err := Write(&file, tr); err != nil {
			t.Fatal(err)
		}
		if back, err := Read(&file); err != nil || fmt.Sprint(back) != fmt.Sprint(tr) {
			t.Errorf("came back as %+v, %v", back, err)
		}
	})
}

// Bounds of the header are those of each figure, and the most rows of a rank follow from its
// experts.
func TestHeaderBounds(t *testing.T) {
	good := Header{Ranks: 4, Tokens: 100, TopK: 2, Layers: 3, Microbatches: 2, Experts: 8}
	for _, x := range []struct {
		with func(h *Header)
		ok   bool
	}{
		{func(h *Header) {}, true},
		{func(h *Header) { h.Ranks = 0 }, false},
		{func(h *Header) { h.Ranks, h.Experts, h.Layers, h.Microbatches = maxCount, 0, 1, 1 }, true},
		{func(h *Header) { h.Ranks, h.Experts, h.Layers, h.Microbatches = maxCount+1, 0, 1, 1 }, false},
		{func(h *Header) { h.Tokens = 0 }, false},
		{func(h *Header) { h.Tokens = maxTokens }, true},
		{func(h *Header) { h.Tokens = maxTokens + 1 }, false},
		{func(h *Header) { h.TopK = 0 }, false},
		{func(h *Header) { h.TopK = 8 }, true},
		{func(h *Header) { h.TopK = 9 }, false},
		{func(h *Header) { h.TopK, h.Experts = 9, 0 }, true},
		{func(h *Header) { h.Layers = 0 }, false},
		{func(h *Header) { h.Microbatches = 0 }, false},
		{func(h *Header) { h.Experts = -4 }, false},
		{func(h *Header) { h.Experts = 6 }, false},
		{func(h *Header) { h.Experts = maxCount }, true},
		{func(h *Header) { h.Experts = maxCount + 4 }, false},
		{func(h *Header) { h.Ranks, h.Layers, h.Microbatches, h.Experts = 1<<10, 1<<10, 1<<8, 0 }, true},
		{func(h *Header) { h.Ranks, h.Layers, h.Microbatches, h.Experts = 1<<10, 1<<10, 1<<8+1, 0 }, false},
	} {
		h := good
		x.with(&h)
		if err := h.check(); (err == nil) != x.ok {
			t.Errorf("%+v: %v", h, err)
		}
	}
	for _, x := range []struct {
		topK, experts, ranks int
		worst, balanced      Rows
	}{{2, 8, 4, 200, 50}, {3, 8, 4, 200, 75}, {3, 4, 4, 100, 75}, {3, 0, 4, 300, 75}, {3, 12, 4, 300, 75}, {1, 8, 3, 100, 34}} {
		h := Header{Ranks: x.ranks, Tokens: 100, TopK: x.topK, Experts: x.experts}
		if h.Worst() != x.worst || h.Balanced() != x.balanced {
			t.Errorf("%+v: at most %d rows, %d if balanced", x, h.Worst(), h.Balanced())
		}
	}
	c := Config{Ranks: 4, Tokens: 100, TopK: 2, Layers: 1, Microbatches: 1, Experts: 8, Steps: 1}
	for _, x := range []struct {
		with func(c *Config)
		ok   bool
	}{
		{func(c *Config) {}, true}, {func(c *Config) { c.Experts = 0 }, false}, {func(c *Config) { c.Steps = 0 }, false},
		{func(c *Config) { c.Steps = maxEntries / 4 }, true}, {func(c *Config) { c.Steps = maxEntries/4 + 1 }, false},
		{func(c *Config) { c.Skew = -0.1 }, false}, {func(c *Config) { c.Skew = maxSkew }, true}, {func(c *Config) { c.Skew = maxSkew + 0.1 }, false},
		{func(c *Config) { c.Kind = Kind(len(kindNames)) }, false},
	} {
		c := c
		x.with(&c)
		if err := c.Check(); (err == nil) != x.ok {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
