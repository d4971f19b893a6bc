// This file owns the tests of what a request may say.

package choose

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// described is a request with other ops, or with other keys before them.
func described(keys, ops string) string {
	return `{` + keys + `"limit": 10, "storages": [4, 5, 0], "span": 100, "offload": true, "recompute": true,
		"units": [{"name": "a", "layer": 0, "offload": true, "recompute_ns": 3}, {"name": "b", "layer": 0}], "ops": [` + ops + `]}`
}

// SPEC S6.4: what a request may say, and what is said of others.
func TestParse(t *testing.T) {
	save, load, release := `{"op": "save", "unit": 0, "storages": [0, 2], "at": 5}`, `{"op": "load", "unit": 0, "at": 6}`, `{"op": "release", "unit": 0, "at": 7}`
	good := save + `,{"op": "take", "storage": 1, "at": 5},{"op": "save", "unit": 1, "microbatch": 4, "storages": [1, 0], "stay": [true, false], "at": 5},{"op": "give", "storage": 1, "at": 6},` + load + "," + release
	for text, says := range map[string]string{
		``:                              "cannot read the request",
		`{`:                             "cannot read the request",
		`[]`:                            "expected an object",
		`{} {}`:                         "one JSON object",
		`{}`:                            "expected a limit from 1",
		described(`"linits": 1,`, ""):   `unknown key "linits"`,
		described(`"span": "1",`, ""):   "span has the wrong kind of value (string)",
		described(`"links": {},`, ""):   "got out 0, in 0, both 0 and latency_ns 0; leave links out",
		described(``, `{"op": "saev"}`): `op 0 ("saev"): expected "save", "load"`,
		described(``, `{"op": "save"}`): "it has no unit",
		described(``, `{"op": "take"}`): "it has no storage",
		described(``, save+","+save):    "unit 0 of microbatch 0 was saved and not loaded",
		described(``, load):             `op 0 ("load"): unit 0 of microbatch 0 was not saved`,
		described(``, save+","+release): "was saved and not loaded",
		described(``, save+`,{"op": "load", "unit": 0, "at": 4}`):                                                        "before the 5 of the op before",
		described(``, `{"op": "take", "storage": 0, "at": 101}`):                                                         "after the end of the step",
		described(``, `{"op": "take", "storage": 3}`):                                                                    "there is no storage 3; give one of the 3",
		described(``, `{"op": "take", "storage": -1}`):                                                                   "there is no storage -1",
		described(``, `{"op": "take", "storage": 0, "unit": 0}`):                                                         "leave all out but storage and at",
		described(``, `{"op": "take", "storage": 0}, {"op": "take", "storage": 0}`):                                      "was taken before",
		described(``, `{"op": "give", "storage": 0}`):                                                                    "neither taken nor saved",
		described(``, `{"op": "take", "storage": 0}, {"op": "give", "storage": 0}, {"op": "give", "storage": 0}`):        "give it once",
		described(``, save+`,{"op": "take", "storage": 0, "at": 5}`):                                                     "take it before its first save",
		described(``, save+`,{"op": "give", "storage": 0, "at": 5},{"op": "save", "unit": 1, "storages": [0], "at": 6}`): "storage 0 was given back",
		described(``, `{"op": "save", "unit": 2}`):                                                                       "there is no unit 2; give one of the 2",
		described(``, `{"op": "save", "unit": -1}`):                                                                      "there is no unit -1",
		described(``, save+`,{"op": "load", "unit": 0, "stay": [true], "at": 6}`):                                        "only a save lists storages",
		described(``, `{"op": "take", "storage": 0, "microbatch": 1}`):                                                   "leave all out but storage and at",
		described(``, `{"op": "take", "storage": 0, "storages": [0]}`):                                                   "leave all out but storage and at",
		described(``, `{"op": "take", "storage": 0, "stay": [true]}`):                                                    "leave all out but storage and at",
		`{"limit": 1, "links": {"out": 1}}`:                                                                              "got out 1, in 0",
		`{"limit": 1, "links": {"in": 1}}`:                                                                               "got out 0, in 1",
		described(``, `{"op": "save", "unit": 0, "storages": [0, 0]}`):                                                   "storage 0 is listed twice",
		described(``, `{"op": "save", "unit": 0, "storages": [7]}`):                                                      "there is no storage 7",
		described(``, `{"op": "save", "unit": 0, "storages": [0], "stay": [true, true]}`):                                "stay has 2 entries for 1 storages",
		described(``, `{"op": "save", "unit": 0, "storage": 0}`):                                                         "it names a storage",
		described(``, `{"op": "save", "unit": 0, "microbatch": -1}`):                                                     "expected a microbatch",
		described(``, save+`,{"op": "load", "unit": 0, "storages": [0], "at": 6}`):                                       "only a save lists storages",
		`{"limit": 1, "span": -1}`:                                                                                       "expected a span",
		`{"limit": 1, "host": -1}`:                                                                                       "expected a host",
		`{"limit": 1, "storages": [-1]}`:                                                                                 "expected storage 0 to have",
		`{"limit": 1, "storages": [1e3]}`:                                                                                "storages has the wrong kind of value",
		`{"limit": 1, "storages": [1125899906842624, 1]}`:                                                                "more than 1125899906842624 bytes in all",
		`{"limit": 1, "units": [{"layer": -1}]}`:                                                                         "expected unit 0 to have a layer",
		`{"limit": 1, "units": [{"recompute_ns": -1}]}`:                                                                  "recompute_ns from 0 (never)",
		`{"limit": 1, "units": [{"name": "a"}, {"name": "a"}]}`:                                                          `units 0 and 1 are both "a" of layer 0`,
		`{"limit": 1, "units": [{"name": "` + strings.Repeat("x", 300) + `"}]}`:                                          "has 300 bytes",
		`{"limit": 1, "drag": 1.5}`:                                                                                      "expected a drag from 0 (copies cost nothing) to 1, got 1.5",
		`{"limit": 1, "effort": 1.5}`:                                                                                    "expected an effort from 0 (all of the usual search) to 1, got 1.5",
		`{"limit": 1, "effort": -1}`:                                                                                     "expected an effort from 0 (all of the usual search) to 1, got -1",
		`{"limit": 1, "drag": -0.1}`:                                                                                     "expected a drag from 0 (copies cost nothing) to 1, got -0.1",
		`{"limit": 1, "links": {"out": 1, "in": 1, "latency_ns": -1}}`:                                                   "leave links out",
	} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), says) || !strings.HasPrefix(err.Error(), "stowage: ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.300s: %v, want %q", text, err, says)
		}
	}
	r, err := Parse([]byte(described(`"links": {"out": 1, "in": 2, "both": 3, "latency_ns": 4},`, good)))
	if err != nil || len(r.Ops) != 6 || r.Units[0].Recompute != 3 || !r.Units[0].Offload || r.Units[1].Offload || r.Span != 100 || !r.Offload || !r.Recompute {
		t.Fatalf("%+v, %v", r, err)
	}
	if want := (memory.Links{Out: 1, In: 2, Both: 3, Latency: 4}); r.Links.rates() != want || r.NeedsLinks() {
		t.Errorf("links %+v", r.Links)
	}
	if r.Links = nil; !r.NeedsLinks() {
		t.Error("a request without links needs none")
	}
}

// Counts are bounded, so that a request cannot take all of the machine.
func TestBounds(t *testing.T) {
	for what, r := range map[string]Request{
		"storages": {Storages: make([]memory.Bytes, mostStorages+1)},
		"units":    {Units: make([]Unit, mostUnits+1)},
		"ops":      {Ops: make([]Op, mostOps+1)},
	} {
		if err := r.check(); err == nil || !strings.Contains(err.Error(), "give at most") {
			t.Errorf("too many %s: %v", what, err)
		}
	}
	if _, err := Parse(make([]byte, mostText+1)); err == nil || !strings.Contains(err.Error(), "give at most") {
		t.Error(err)
	}
}

// Whatever the bytes are, they are a request that can be answered or a sentence.
func FuzzParse(f *testing.F) {
	f.Add(described(``, `{"op": "save", "unit": 0, "storages": [0, 2], "at": 5}, {"op": "load", "unit": 0, "at": 6}, {"op": "release", "unit": 0, "at": 9}`))
	f.Add(described(`"links": {"out": 1, "in": 2},`, `{"op": "take", "storage": 1}, {"op": "save", "unit": 1, "storages": [1], "stay": [true]}, {"op": "give", "storage": 1}`))
	f.Add(described(``, `{"op": "save", "unit": 0, "storages": [0]}, {"op": "save", "unit": 1, "storages": [0, 1]}, {"op": "load", "unit": 1}, {"op": "release", "unit": 1}, {"op": "load", "unit": 0}`))
	f.Add(`{"limit": 1}`)
	f.Fuzz(func(t *testing.T, text string) {
		r, err := Parse([]byte(text))
		if err != nil {
			if !strings.HasPrefix(err.Error(), "stowage: ") {
				t.Error(err)
			}
			return
		}
		if len(r.Units) > 6 || len(r.Ops) > 40 {
			return
		}
		if err := answered(r); err != nil {
			t.Error(err)
		}
	})
}

// answered solves a request and compares the answer with the request.
func answered(r *Request) error {
	a, err := r.Solve(Machine{Links: memory.Links{Out: 1e9, In: 1e9}, Host: residency.Unlimited})
	if low, small := err.(*memory.BudgetError); small {
		if low.Need <= r.Limit {
			return fmt.Errorf("a limit of %d is too small, and %d are enough", r.Limit, low.Need)
		}
		again := *r
		again.Limit = low.Need
		_, err := again.Solve(Machine{Links: memory.Links{Out: 1e9, In: 1e9}, Host: residency.Unlimited})
		return err
	}
	if err != nil {
		return err
	}
	if a.Peak > r.Limit || a.Peak > a.BeforePeak && a.Nothing || len(a.Choices) != len(r.Units) || a.Before != r.Span || a.Step < a.Before || a.Notes == nil {
		return fmt.Errorf("a limit of %d, and %+v", r.Limit, a)
	}
	for i, c := range a.Choices {
		u := r.Units[i]
		if a.Nothing && c != memory.Keep || c == memory.Offload && !(u.Offload && r.Offload) || c == memory.Recompute && !(u.Recompute > 0 && r.Recompute) || c == memory.Stash {
			return fmt.Errorf("%v for unit %d of %+v", c, i, a)
		}
	}
	_, err = json.Marshal(a)
	return err
}

// Every limit of a request may be reached and not exceeded.
func TestLimitsMayBeReached(t *testing.T) {
	unit := func(n int) *int { return &n }
	request := func(change func(*Request)) *Request {
		r := &Request{Limit: 10, Span: 100, Storages: []memory.Bytes{1}, Units: []Unit{{Name: "a"}}, Ops: []Op{{Kind: "save", Unit: unit(0), Storages: []int{0}, At: 5}}}
		change(r)
		return r
	}
	links := func(change func(*Links)) *Links {
		l := &Links{Out: 1, In: 1, Both: 1}
		change(l)
		return l
	}
	for name, set := range map[string]func(r *Request, more int){
		"limit":      func(r *Request, more int) { r.Limit = mostBytes + memory.Bytes(more) },
		"span":       func(r *Request, more int) { r.Span = longestStep + time.Duration(more) },
		"storage":    func(r *Request, more int) { r.Storages[0] = mostBytes + memory.Bytes(more) },
		"all":        func(r *Request, more int) { r.Storages = []memory.Bytes{mostBytes - 5, 5 + memory.Bytes(more)} },
		"layer":      func(r *Request, more int) { r.Units[0].Layer = mostLayer + more },
		"name":       func(r *Request, more int) { r.Units[0].Name = strings.Repeat("x", mostName+more) },
		"recompute":  func(r *Request, more int) { r.Units[0].Recompute = longestForward + time.Duration(more) },
		"microbatch": func(r *Request, more int) { r.Ops[0].Microbatch = mostOps + more },
		"at":         func(r *Request, more int) { r.Ops[0].At = r.Span + time.Duration(more) },
		"unit":       func(r *Request, more int) { r.Ops[0].Unit = unit(more) },
		"out":        func(r *Request, more int) { r.Links = links(func(l *Links) { l.Out = mostRate * (1 + float64(more)) }) },
		"in":         func(r *Request, more int) { r.Links = links(func(l *Links) { l.In = mostRate * (1 + float64(more)) }) },
		"both": func(r *Request, more int) {
			r.Links = links(func(l *Links) { l.Both = 2 * mostRate * (1 + float64(more)) })
		},
		"latency": func(r *Request, more int) {
			r.Links = links(func(l *Links) { l.Latency = mostLatency + time.Duration(more) })
		},
		"no limit":   func(r *Request, more int) { r.Limit = 1 - memory.Bytes(more) },
		"no span":    func(r *Request, more int) { r.Span, r.Ops[0].At = -time.Duration(more), 0 },
		"no layer":   func(r *Request, more int) { r.Units[0].Layer = -more },
		"no time":    func(r *Request, more int) { r.Units[0].Recompute = -time.Duration(more) },
		"no bytes":   func(r *Request, more int) { r.Storages[0] = -memory.Bytes(more) },
		"first":      func(r *Request, more int) { r.Ops[0].Microbatch = -more },
		"no both":    func(r *Request, more int) { r.Links = links(func(l *Links) { l.Both = -float64(more) }) },
		"no latency": func(r *Request, more int) { r.Links = links(func(l *Links) { l.Latency = -time.Duration(more) }) },
	} {
		for more := range 2 {
			err := request(func(r *Request) { set(r, more) }).check()
			if (err != nil) != (more > 0) {
				t.Errorf("%s, %d beyond the limit: %v", name, more, err)
			}
		}
	}
}

// Empty storages are left out of the tape, and the others keep their own sizes and wishes.
func TestEmptyStoragesAreLeftOut(t *testing.T) {
	zero := 0
	r := &Request{Limit: 100, Span: 10, Storages: []memory.Bytes{0, 4, 0, 5, 6}, Units: []Unit{{Name: "a"}}, Ops: []Op{
		{Kind: "save", Unit: &zero, Storages: []int{0, 1, 2, 3, 4}, Stay: []bool{true, false, false, true, false}},
	}}
	if err := r.check(); err != nil {
		t.Fatal(err)
	}
	var sizes []memory.Bytes
	var items []residency.Item
	for _, op := range r.profile().Tape.Ops {
		switch op.Kind {
		case residency.OpBorrow:
			sizes = append(sizes, op.Bytes)
		case residency.OpSave:
			items = op.Items
		}
	}
	if want := []residency.Item{{ID: 0}, {ID: 1, Stay: true}, {ID: 2}}; !slices.Equal(sizes, []memory.Bytes{4, 5, 6}) || !slices.Equal(items, want) {
		t.Errorf("storages of %v, saved as %v; want %v", sizes, items, want)
	}
}
