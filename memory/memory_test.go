// This file owns the tests of sizes, kinds, choices, keys, links and errors.

package memory

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestParseBytes(t *testing.T) {
	for _, c := range []struct {
		text string
		want Bytes
		err  string
	}{
		{"1B", 1, ""}, {"64MiB", 64 * MiB, ""}, {"3KiB", 3 * KiB, ""}, {"1024TiB", 1024 * TiB, ""},
		{"0B", 0, "at least 1B"}, {"1025TiB", 0, "at most 1024TiB"},
		{"52.5GiB", 52*GiB + 512*MiB, ""}, {"52GB", 52e9, ""}, {"52G", 52 * GiB, ""}, {"52.5 gib", 52*GiB + 512*MiB, ""}, {"1.5mb", 1500000, ""},
		{"0.5K", 512, ""}, {"1.9B", 1, ""}, {"1024T", 1024 * TiB, ""}, {"1125899906842624B", 1024 * TiB, ""}, {"0.3GB", 3e8, ""},
		{"0.5B", 0, "at least 1B"}, {"1024.1TiB", 0, "at most 1024TiB"}, {"1126TB", 0, "at most 1024TiB"}, {"99999999999999999999B", 0, "at most 1024TiB"},
		{"", 0, "expected a size such as 52.5GiB"}, {"60", 0, "expected a size such as 52.5GiB"}, {"MiB", 0, "such as"}, {"-1B", 0, "such as"},
		{"1.GiB", 0, "such as"}, {".5GiB", 0, "such as"}, {"1.2.3GiB", 0, "such as"}, {"1e3B", 0, "such as"}, {" 1B", 0, "such as"}, {"1  B", 0, "such as"}, {"5GiBB", 0, "such as"},
	} {
		got, err := ParseBytes(c.text)
		switch {
		case c.err == "" && (err != nil || got != c.want):
			t.Errorf("%q: %d, %v; want %d", c.text, got, err, c.want)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), fmt.Sprintf("%q", c.text))):
			t.Errorf("%q: %d, %v; want an error with %q and the text", c.text, got, err, c.err)
		}
	}
}

func FuzzParseBytes(f *testing.F) {
	for _, s := range []string{"64MiB", "1B", "0KiB", "1024TiB", "9223372036854775807B", "B", "１B", "52.5 GiB", "0.1G", "1.99999999999999999TB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseBytes(s)
		if err != nil {
			return
		}
		if again, err := ParseBytes(n.Exact()); err != nil || again != n || n <= 0 || n > mostBytes {
			t.Errorf("%q gives %d, which is written %q and read as %d, %v", s, n, n.Exact(), again, err)
		}
	})
}

func TestBytesString(t *testing.T) {
	for n, want := range map[Bytes]string{
		0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 1536: "1.50 KiB", -2 * MiB: "-2.00 MiB", 5*GiB + 256*MiB: "5.25 GiB", 2 * TiB: "2048.00 GiB",
		1: "1 B", -1023: "-1023 B", -KiB: "-1.00 KiB", MiB - 1: "1024.00 KiB", MiB: "1.00 MiB", 256 * MiB: "256.00 MiB", GiB: "1.00 GiB",
		141 * GiB / 100: "1.41 GiB", -3 * GiB: "-3.00 GiB", math.MaxInt64: "8589934592.00 GiB",
	} {
		if n.String() != want {
			t.Errorf("%d: %q, want %q", int64(n), n.String(), want)
		}
	}
}

// A choice survives JSON, and what is not a choice is rejected both ways.
func TestChoiceText(t *testing.T) {
	for c := Keep; c < Choices; c++ {
		if choiceNames[c] == "" {
			t.Errorf("choice %d has no name", uint8(c))
		}
		text, err := json.Marshal(c)
		var again Choice
		if err2 := json.Unmarshal(text, &again); err != nil || err2 != nil || again != c {
			t.Errorf("%v: %s, %v, %v, %v", c, text, err, again, err2)
		}
	}
	if _, err := json.Marshal(Choice(Choices)); err == nil {
		t.Errorf("%v was written", Choice(Choices))
	}
	var c Choice
	if err := c.UnmarshalText([]byte("drop")); err == nil || !strings.Contains(err.Error(), "keep, stash, offload, recompute") {
		t.Errorf("drop: %v", err)
	}
}

func TestWords(t *testing.T) {
	for want, got := range map[string]fmt.Stringer{
		"device":                              Device,
		"host":                                Host,
		"Kind(7)":                             Kind(7),
		"Choice(9)":                           Choice(9),
		"Phase(3)":                            Phase(3),
		"train, 1 microbatch":                 Key{Microbatches: 1},
		"evaluate, 2 microbatches, shape 4x5": Key{Evaluate, 2, "4x5"},
		"moe_act of layer 3, chunk 1":         Unit{"moe_act", 1, 3},
		"moe_act of layer 3, chunk 1, microbatch 5": GroupID{"moe_act", 1, 3, 5},
		"Scope(9)": Scope(9),
	} {
		if got.String() != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if g := (GroupID{"a", 1, 2, 3}); g.Unit() != (Unit{"a", 1, 2}) {
		t.Errorf("%v belongs to %v", g, g.Unit())
	}
}

func TestLinks(t *testing.T) {
	good := Links{Out: 100, In: 50, Both: 120, Latency: time.Microsecond}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for _, bad := range []Links{{}, {Out: 1}, {Out: 1, In: -1}, {Out: 1, In: 1, Both: -1}, {Out: 1, In: 1, Latency: -1}} {
		if bad.Check() == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
	if out, in := good.Shared(); out != 80 || in != 40 {
		t.Errorf("120 bytes/s are shared as %g and %g, want 80 and 40", out, in)
	}
	if out, in := (Links{Out: 3, In: 2}).Shared(); out != 3 || in != 2 {
		t.Errorf("links that do not share give %g and %g", out, in)
	}
	// Both directions together are never faster than each alone.
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Float64Range(1, 1e12)
		l := Links{Out: rate.Draw(t, "out"), In: rate.Draw(t, "in"), Both: rate.Draw(t, "both")}
		if out, in := l.Shared(); out > l.Out || in > l.In || out+in > l.Both*(1+1e-9) && l.Both < l.Out+l.In {
			t.Fatalf("%+v share %g and %g", l, out, in)
		}
	})
}

func TestErrors(t *testing.T) {
	if OnRank(3, nil) != nil {
		t.Error("no error on rank 3 is an error")
	}
	cause := errors.New("no room")
	err := fmt.Errorf("train: %w", OnRank(3, cause))
	var rank *RankError
	if !errors.As(err, &rank) || rank.Rank != 3 || !errors.Is(err, cause) {
		t.Errorf("%v does not say rank 3", err)
	}
	if OnRank(5, err) != err {
		t.Error("the first rank must stay")
	}
	for want, err := range map[string]error{
		"Budget 5 B is too small; raise it": &SettingError{Setting: "Budget", Asked: "5 B", Problem: "is too small", Remedy: "raise it"},
		"Device is missing; set it":         &SettingError{Setting: "Device", Asked: "", Problem: "is missing", Remedy: "set it"},
		"rank 3: no room":                   OnRank(3, cause),
		"rank 1: a budget of 1.00 MiB is too small: the step needs 2.00 MiB even with everything offloaded or recomputed that can be; raise it to 2.00 MiB, allow more host memory, or use smaller microbatches": &BudgetError{Rank: 1, Budget: MiB, Need: 2 * MiB, HostFull: true},
		"rank 0: a budget of 1.00 MiB is smaller than the 3.00 MiB that weights, optimiser and tables hold; raise the budget or shard the parameters":                                                            &BudgetError{Budget: MiB, Held: 3 * MiB},
	} {
		if err.Error() != want {
			t.Errorf("%q\nwant %q", err, want)
		}
	}
}

// Short agrees with String but for a decimal, on both sides of every unit.
func TestBytesShort(t *testing.T) {
	for _, unit := range []Bytes{KiB, MiB, GiB, TiB} {
		for _, n := range []Bytes{unit - 1, unit, unit + 1, 3 * unit / 2, -unit} {
			long := strings.Fields(n.String())
			short := strings.Fields(n.Short())
			a, err1 := strconv.ParseFloat(long[0], 64)
			b, err2 := strconv.ParseFloat(short[0], 64)
			if err1 != nil || err2 != nil || short[1] != long[1] || math.Abs(a-b) > 0.05 || max(n, -n) >= MiB && max(n, -n) < GiB && len(short[0]) != len(long[0])-1 {
				t.Errorf("%d is %q and %q", int64(n), n.String(), n.Short())
			}
		}
	}
	if GiB.Short() != "1.00 GiB" || MiB.Short() != "1.0 MiB" || KiB.Short() != "1.0 KiB" || Bytes(1000).Short() != "1000 B" {
		t.Errorf("%s, %s, %s and %s", GiB.Short(), MiB.Short(), KiB.Short(), Bytes(1000).Short())
	}
}

// The table of a summary has every group with its own figures, and their sums.
func TestSummaryText(t *testing.T) {
	s := Summary{
		Rank: 3, Budget: 64 * MiB, Device: 7 * MiB, Host: 5 * MiB, Extent: 9 * MiB,
		Groups: []GroupSummary{
			{Name: "attn_proj", Groups: 2, Bytes: 3 * MiB, Moved: MiB, Units: map[Choice]int{Keep: 1, Offload: 2}},
			{Name: "mlp", Groups: 4, Bytes: 10 * MiB, Moved: 4 * MiB, Units: map[Choice]int{Recompute: 4, Stash: 1}},
			{Name: "router", Groups: 1, Bytes: KiB},
		},
		Counts: CopyCounts{Out: 11, In: 12, Late: 13, Evicted: 14, Duplicates: 15},
	}
	const want = `rank 3   group               groups        saved    offloaded   choices
         attn_proj                2     3.00 MiB     1.00 MiB   1 keep, 2 offload
         mlp                      4    10.00 MiB     4.00 MiB   1 stash, 4 recompute
         router                   1     1.00 KiB          0 B   
         all                           13.00 MiB     5.00 MiB
device 7.00 MiB at most, host 5.00 MiB, budget 64.00 MiB; 11 copies out, 12 in, 13 late, 14 evicted, 15 duplicates
`
	if got := s.String(); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	s.Budget = 0
	if got := s.String(); strings.Contains(got, "budget") {
		t.Errorf("no budget is printed as %s", got)
	}
}
