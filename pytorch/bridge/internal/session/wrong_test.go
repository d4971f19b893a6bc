// This file owns wrong use and configurations: what is refused, and what is said.

package session

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// aligned returns aligned memory that is never on a stack, which may move. It is kept until
// the test ends: the session knows its address alone, which keeps nothing from the collector.
//
//go:noinline
func aligned(t *testing.T, n int) []byte {
	b := make([]byte, n+16)
	t.Cleanup(func() { runtime.KeepAlive(b) })
	return b[-address(b)%16:][:n]
}

func opened(t *testing.T, text string, provide Provide) *Session {
	t.Helper()
	cfg, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(cfg, provide)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// SPEC S6.4: wrong use is told from what failed, with one sentence that says what to do;
// the session is as it was, and a right step follows.
func TestWrongUse(t *testing.T) {
	s := opened(t, `{"device": "cpu"}`, nil)
	b := aligned(t, 64)
	right := Storage{ID: 1, Address: address(b), Bytes: 64}
	save := func(x ...Storage) error { _, _, err := s.Save("mlp", x); return err }
	load := func(n uint64) error { _, _, err := s.Load(n); return err }
	release := func(n uint64) error { _, err := s.Release(n); return err }
	end := func() error { _, err := s.End(false); return err }
	wrong := func(what string, err error, says ...string) {
		t.Helper()
		if !errors.As(err, new(Wrong)) {
			t.Errorf("%s: %v", what, err)
			return
		}
		for _, x := range says {
			if !strings.Contains(err.Error(), x) {
				t.Errorf("%s: %v; want %q in it", what, err, x)
			}
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	wrong("save outside", save(right), `"mlp"`, "begin one first")
	wrong("load outside", load(1), "inside of the step")
	wrong("release outside", release(1), "inside of the step")
	wrong("end outside", end(), "begin one first")
	wrong("a stream of a GPU's", s.Begin("k", 7), "expected stream 0", "0x7")
	must(s.Begin("k", 0))
	wrong("begin inside", s.Begin("k", 0), "end that first")
	wrong("check inside", s.Check(0), "end it first")
	for _, x := range []Storage{{}, {ID: 1, Bytes: 64}, {ID: 1, Address: 1}, {Address: 1, Bytes: 64}} {
		wrong("an incomplete storage", save(right, x), "give an id, an address and a size")
	}
	wrong("no rows", save(Storage{ID: 2, Address: address(b), Bytes: 64, Rows: address(b)}), "bytes of a row")
	wrong("a part of a row", save(Storage{ID: 2, Address: address(b), Bytes: 64, Rows: address(b), RowBytes: 24}), "bytes of a row")
	wrong("rows anywhere", save(Storage{ID: 2, Address: address(b) + 8, Bytes: 48, Rows: address(b), RowBytes: 24}), "aligned to 16")
	wrong("a count anywhere", save(Storage{ID: 2, Address: address(b), Bytes: 48, Rows: address(b) + 4, RowBytes: 24}), "count at a multiple of 8")
	wrong("rows behind right ones", save(Storage{ID: 2, Address: address(b), Bytes: 48, Rows: address(b), RowBytes: 24}, Storage{ID: 3, Address: address(b), Bytes: 48, Rows: address(b)}), "bytes of a row")
	_, err := s.Rows(2)
	wrong("rows of a group that was not saved", err, "storage 2")
	wrong("a group of no step", load(5), "not one of this step")
	must(save(right))
	must(load(1))
	must(release(1))
	wrong("loaded after its release", load(1), "was released")
	wrong("released twice", release(1), "was released")
	clear(b)
	must(save(Storage{ID: 4, Address: address(b), Bytes: 48, Rows: address(b) + 48, RowBytes: 24}))
	must(release(2))
	wrong("rows released twice", release(2), "was released")
	must(end())
	must(s.Begin("k", 0))
	wrong("a group of the step before", load(1), "not one of this step")
	must(save(right))
	must(end())
	wrong("a trace nowhere", s.Trace(filepath.Join(t.TempDir(), "none", "x")), "none")
	must(s.Trace("/dev/full"))
	if err := s.Trace(""); err == nil || !strings.HasPrefix(err.Error(), "stowage: the trace is incomplete: ") {
		t.Errorf("a trace without room: %v", err)
	}
	must(s.Close())
	must(s.Close())
	wrong("closed", s.Begin("k", 0), "open another")
	_, err = s.Stats()
	wrong("figures of a closed one", err, "open another")
}

// SPEC S6.4: a group that was released is gone, also if it was offloaded and never loaded:
// a second release and a load are wrong use.
func TestReleasedIsGone(t *testing.T) {
	for _, choice := range []string{"keep", "offload"} {
		var provided [][]byte
		s := opened(t, `{"device": "cpu", "policy": {"mlp": "`+choice+`"}}`, func(_, n uint64) uint64 {
			provided = append(provided, aligned(t, int(n)))
			return address(provided[len(provided)-1])
		})
		for step := range 3 {
			if err := s.Begin("k", 0); err != nil {
				t.Fatal(err)
			}
			b := aligned(t, 256)
			returned := 0
			count := func(ids []uint64, err error) {
				t.Helper()
				if returned += len(ids); err != nil {
					t.Fatal(err)
				}
			}
			for i := range uint64(4) {
				_, ids, err := s.Save("mlp", []Storage{{ID: i + 1, Address: address(b) + 64*i, Bytes: 64}})
				count(ids, err)
			}
			for n := uint64(1); n <= 3; n++ {
				count(s.Release(n))
				if ids, err := s.Release(n); !errors.As(err, new(Wrong)) || len(ids) > 0 {
					t.Errorf("step %d, %s: a second release of group %d returns %v, %v", step, choice, n, ids, err)
				}
				if _, ids, err := s.Load(n); !errors.As(err, new(Wrong)) || len(ids) > 0 {
					t.Errorf("step %d, %s: group %d is loaded after its release: %v, %v", step, choice, n, ids, err)
				}
			}
			if count(s.End(false)); returned != 4+len(provided) {
				t.Errorf("step %d, %s: memory was returned %d times; want 4 and %d", step, choice, returned, len(provided))
			}
		}
	}
}

// A callback that panics, or that has no memory, loses the step and no more.
func TestProviderThatFails(t *testing.T) {
	for what, provide := range map[string]Provide{
		"nothing": func(_, _ uint64) uint64 { return 0 },
		"panic":   func(_, _ uint64) uint64 { panic("the callback's own mistake") },
	} {
		s := opened(t, `{"device": "cpu", "policy": {"mlp": "offload"}}`, provide)
		for range 2 {
			if err := s.Begin("k", 0); err != nil {
				t.Fatal(err)
			}
			b := aligned(t, 64)
			n, returned, err := s.Save("mlp", []Storage{{ID: 3, Address: address(b), Bytes: 64}})
			if err != nil {
				t.Fatal(err)
			}
			_, more, err := s.Load(n)
			if err == nil || what == "nothing" && !strings.Contains(err.Error(), "provided no memory") {
				t.Errorf("%s: %v", what, err)
			}
			last, _ := s.End(true)
			if all := append(append(returned, more...), last...); len(all) != 1 || all[0] != 3 {
				t.Errorf("%s: returned %v", what, all)
			}
		}
	}
}

// SPEC S6.4: what a configuration may say, and what is said of others.
func TestParse(t *testing.T) {
	for text, says := range map[string]string{
		``:                                       "cannot read",
		`{`:                                      "cannot read",
		`null`:                                   `expected the device "cpu" or "cuda", got ""`,
		`{"device": "tpu"}`:                      `got "tpu"`,
		`{"device": "cpu", "bugdet": 1}`:         `"bugdet"`,
		`{"device": "cpu"} {}`:                   "one JSON object",
		`{"device": "cpu", "saved_limit": -1}`:   "must not be negative",
		`{"device": "cpu", "least": -1}`:         "must not be negative",
		`{"device": "cpu", "rank": -1}`:          "must not be negative",
		`{"device": "cpu", "saved_limit": "60"}`: "saved_limit has the wrong kind of value (string)",
		`{"device": "cpu", "saved_limit": 5, "policy": {"a": "keep"}}`:        "give one of them",
		`{"device": "cpu", "policy": {"a": "recompute"}}`:                     `cannot recompute group "a"`,
		`{"device": "cpu", "policy": {"a": "leave"}}`:                         "leave",
		`{"device": "cpu", "live": 1.5}`:                                      "between 0 (count rows first) and 1, got 1.5",
		`{"device": "cpu", "live": -0.5}`:                                     "got -0.5",
		`{"device": "cpu", "pages": {}}`:                                      "unknown key",
		`{"device": "cpu", "ordinal": 99999999999999999999999999999999999}`:   "ordinal",
		`{"device": "cuda", "context": 12, "stream": 13, "policy": {"a":""}}`: "cannot read",
	} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", text, err)
		}
	}
	c, err := Parse([]byte(`{"device": "cuda", "ordinal": 1, "context": 12, "stream": 13, "saved_limit": 14, "host": 15, "least": 16, "rank": 17, "log": true,
		"policy": {}, "live": 0.5}`))
	if err != nil || c.Ordinal != 1 || c.Context != 12 || c.Stream != 13 || c.Limit != 14 || c.Host != 15 || c.Least != 16 || c.Rank != 17 || !c.Log || c.Live != 0.5 {
		t.Errorf("%+v, %v", c, err)
	}
	c, err = Parse([]byte(`{"device": "cpu", "policy": {"a": "stash", "b": "offload"}}`))
	if n := c.choices(); err != nil || n["a"] != memory.Keep || n["b"] != memory.Offload || len(n) != 2 {
		t.Errorf("%+v, %v", n, err)
	}
}

// Whatever the bytes are, they are a configuration that can be used or a sentence.
func FuzzParse(f *testing.F) {
	for _, x := range []string{`{"device": "cpu"}`, `{"device": "cuda", "policy": {"a": "stash"}}`, `{"device": "cpu", "live": 0.25}`, `[]`, `{"device": 1e9}`} {
		f.Add([]byte(x))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := Parse(text)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "stowage: ") {
				t.Error(err)
			}
			return
		}
		if c.Limit < 0 || c.Host < 0 || c.Device == "" || c.Limit > 0 && len(c.Policy) > 0 {
			t.Errorf("%+v", c)
		}
		for name, x := range c.choices() {
			if x != memory.Keep && x != memory.Offload {
				t.Errorf("%q: %v", name, x)
			}
		}
	})
}

// SPEC S6.4: figures are JSON, at any time; a trace can be switched on and off, and read.
func TestStatsAndTrace(t *testing.T) {
	var provided [][]byte
	s := opened(t, `{"device": "cpu", "policy": {"mlp": "offload"}, "rank": 3}`, func(_, n uint64) uint64 {
		provided = append(provided, make([]byte, n))
		return address(provided[len(provided)-1])
	})
	path := filepath.Join(t.TempDir(), "a.trace")
	step := func() {
		t.Helper()
		b := aligned(t, 4096)
		n, err := uint64(0), s.Begin("k", 0)
		if err == nil {
			n, _, err = s.Save("mlp", []Storage{{ID: 1, Address: address(b), Bytes: 4096}})
		}
		if err == nil {
			_, _, err = s.Save("norm", []Storage{{ID: 2, Address: address(b), Bytes: 8}})
		}
		if err == nil {
			_, _, err = s.Load(n)
		}
		if err == nil {
			_, err = s.End(false)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	figures := func() (x struct {
		Steps   int
		Summary struct{ Groups []any }
	}) {
		t.Helper()
		text, err := s.Stats()
		if err == nil {
			err = json.Unmarshal(text, &x)
		}
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	figures()
	step()
	began := time.Now()
	time.Sleep(time.Millisecond) // which the trace, not yet on, knows nothing of
	for _, to := range []string{path, ""} {
		if err := s.Trace(to); err != nil {
			t.Fatal(err)
		}
		step()
	}
	over := time.Now()
	if x := figures(); x.Steps != 3 || len(x.Summary.Groups) != 2 {
		t.Errorf("%+v", x)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tr, err := trace.Read(f)
	if err != nil || tr.Cut != nil {
		t.Fatal(err, tr)
	}
	seen := map[trace.Kind]int{}
	for _, e := range tr.Events {
		seen[e.Kind]++
		if e.Rank != 3 {
			t.Fatalf("%+v", e)
		}
		// Times count from the header's, not from when the process began.
		if at := tr.Header.Began + e.Time; e.Time < 0 || at < began.UnixNano() || at > over.UnixNano() {
			t.Fatalf("an event at %v of a trace that lasted from %v to %v", time.Unix(0, at), began, over)
		}
	}
	if seen[trace.Begin] != 1 || seen[trace.End] != 1 || seen[trace.Offload] != 1 || seen[trace.Reload] != 1 || tr.Header.Rank != 3 {
		t.Errorf("%v, %+v", seen, tr.Header)
	}
}

// Rows that are checked while the stream is captured would be checked before the replay:
// that is told, and spoils no capture.
func TestCheckInACapture(t *testing.T) {
	s := opened(t, `{"device": "cpu"}`, nil)
	b := aligned(t, 64)
	clear(b)
	err := s.Begin("k", 0)
	if err == nil {
		_, _, err = s.Save("moe", []Storage{{ID: 1, Address: address(b), Bytes: 48, Rows: address(b) + 48, RowBytes: 24}})
	}
	if err == nil {
		_, err = s.End(false)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.compute.BeginCapture()
	if err := s.Check(0); !errors.As(err, new(Wrong)) || !strings.Contains(err.Error(), "after the replay") {
		t.Error(err)
	}
	g, err := s.compute.EndCapture()
	if err == nil {
		err = errors.Join(g.Close(), s.Check(0))
	}
	if err != nil {
		t.Error(err)
	}
}

// What a call returns on the CPU is the caller's at once, also if the call failed or was wrong: nothing that was issued
// before may still use it.
func TestReturnedIsUnused(t *testing.T) {
	s := opened(t, `{"device": "cpu"}`, nil)
	for name, end := range map[string]func() error{
		"well":   func() error { return nil },
		"failed": func() error { return errors.New("a call fails") },
		"wrong":  func() error { panic("a call is wrong") },
	} {
		var used atomic.Bool
		returned, _ := s.guardReturning(func() error {
			s.compute.Host(func() {
				time.Sleep(20 * time.Millisecond)
				used.Store(true)
			})
			s.returned = append(s.returned, 1)
			return end()
		})
		if !used.Load() || len(returned) != 1 {
			t.Errorf("a call that ends %s returns %v while work that uses it is under way", name, returned)
		}
	}
}
