package export

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// screensOf exports traces and reads them as the viewer does.
func screensOf(t rapid.TB, traces ...*trace.Trace) []*screen {
	t.Helper()
	var out bytes.Buffer
	if err := MemoryViz(&out, traces); err != nil {
		t.Fatal(err)
	}
	all, err := screens(out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// sum returns the bytes alive after an event, by name.
func (s *screen) sum(i int) map[string]int64 {
	by := map[string]int64{}
	for _, b := range s.alive[i] {
		by[b.name] += b.size
	}
	return by
}

// SPEC S6.5: a rank is a device, its storages are blocks with their groups, and memory of
// owners lies beside them. The heap of the storages is not counted twice.
func TestMemoryViz(t *testing.T) {
	const steps, layers = 2, 4
	all := screensOf(t, aRun(2, steps, layers), aRun(0, steps, layers))
	if len(all) != 6 || len(all[1].actions)+len(all[4].actions) != 0 || len(all[0].actions) != len(all[2].actions) {
		t.Fatalf("there are %d devices", len(all))
	}
	for _, c := range []struct {
		device int
		name   string
		most   int64
		last   int64
	}{
		{0, "parameters", 1 << 20, 1 << 20},
		{2, "shards", 3500, 100},
		{2, "attn", 1000, 0},
		{0, "mlp", 1000, 0},
		{5, "attn", 2000, 0},
		{0, trace.HeapOwner(memory.Device), 0, 0},
		{5, trace.HeapOwner(memory.Host), 0, 0},
		{0, "no group", 0, 0}, // all are saved
	} {
		s := all[c.device]
		var most int64
		for i := range s.alive {
			most = max(most, s.sum(i)[c.name])
		}
		if last := s.sum(len(s.alive) - 1)[c.name]; most != c.most || last != c.last {
			t.Errorf("of device %d %q has %d at most and %d in the end, not %d and %d", c.device, c.name, most, last, c.most, c.last)
		}
	}
	for _, e := range all[0].actions {
		if e["action"] == "alloc" && e["category"] == "mlp" {
			f := items(e, "frames")
			layer, micro := f[0].(dict), f[1].(dict)
			if layer["filename"] != "layer" || num(layer, "line") != 1 || micro["filename"] != "microbatch" || num(micro, "line") != 1 || e["user_metadata"] != "step 0" {
				t.Errorf("a storage is %v", e)
			}
			return
		}
	}
	t.Error("no storage of the group was taken")
}

// The viewer can show any trace, and what is alive at the end is what was allocated and not
// freed.
// Times are in microseconds from the beginning of the run's clock.
func TestMemoryVizTimes(t *testing.T) {
	x := &trace.Trace{Header: trace.Header{Began: 7_000_000_000}, Events: []trace.Event{{Kind: trace.Alloc, Name: "o", Bytes: 512, Time: 5_000_000}, {Kind: trace.Free, Name: "o", Bytes: 512, Time: 9_000_000}}}
	var got []int64
	for _, a := range screensOf(t, x)[0].actions {
		got = append(got, num(a, "time_us"))
	}
	if fmt.Sprint(got) != "[7005000 7005000 7009000 7009000 7009000 7009000]" {
		t.Errorf("%v", got)
	}
}

func TestMemoryVizAlwaysValid(t *testing.T) { rapid.Check(t, memoryVizValid) }

func FuzzMemoryViz(f *testing.F) { f.Fuzz(rapid.MakeFuzz(memoryVizValid)) }

func memoryVizValid(t *rapid.T) {
	traces := anyTraces(t)
	want := map[memory.Kind]int64{}
	for _, in := range traces {
		p := [2]*places{newPlaces(0, in, memory.Device), newPlaces(0, in, memory.Host)}
		l := newLedger(in.Header.Rank,
			func(h *holding) { want[h.Tier] += min(h.Bytes, largest+1) % (largest + 1) },
			func(h *holding) { want[h.Tier] -= min(h.Bytes, largest+1) % (largest + 1) })
		l.groups = map[int]*trace.Event{}
		for i := range in.Events {
			e := &in.Events[i]
			ofHeap := (e.Kind == trace.Alloc || e.Kind == trace.Free) && e.Tier <= memory.Host && p[e.Tier].ofPool(e) && p[e.Tier].pool > 0
			if !ofHeap {
				l.apply(e)
			}
		}
	}
	got := map[memory.Kind]int64{}
	all := screensOf(t, traces...)
	for i, s := range all {
		if n := len(s.alive); n > 0 {
			for _, size := range s.sum(n - 1) {
				got[memory.Kind(i/(len(all)/2))] += size
			}
		}
	}
	for _, tier := range []memory.Kind{memory.Device, memory.Host} {
		if got[tier] != want[tier] {
			t.Fatalf("tier %d has %d bytes in the end, not %d", tier, got[tier], want[tier])
		}
	}
}

// The reader of these tests finds snapshots that the viewer could not show.
func TestScreensPlanted(t *testing.T) {
	block := &holding{Event: trace.Event{Bytes: 10, Name: "x"}, addr: 512, own: true}
	for what, plant := range map[string]func(v *snapshot){
		"lies in 0 segments": func(v *snapshot) {
			v.action("alloc", 512, 10, block)
			v.action("free_requested", 512, 10, block)
			v.action("free_completed", 512, 10, block)
		},
		"allocates": func(v *snapshot) {
			v.action("segment_alloc", 512, 512, block)
			v.action("alloc", 512, 10, block)
			v.action("segment_free", 512, 512, block)
		},
		"frees what is not freed": func(v *snapshot) { v.action("free_requested", 512, 10, block) },
		"there before all":        func(v *snapshot) { v.action("segment_free", 512, 512, block) },
		"that is not there":       func(v *snapshot) { v.action("segment_alloc", 512, 512, block) },
		"no category":             func(v *snapshot) { v.events.item(); v.dict(); v.words("category", "x"); v.endDict() },
		"later than the next":     func(v *snapshot) { v.now = 5; v.mark(); v.now = 4; v.mark() },
		"is used again": func(v *snapshot) {
			v.took(block)
			v.action("free_requested", block.addr, 10, block)
			v.action("free_completed", block.addr, 10, block)
			v.done = []*device{{v.places, false, []*holding{block}}}
		},
		"is nonsense":           func(v *snapshot) { v.action("nonsense", 0, 0, block) },
		"opcode":                func(v *snapshot) { v.op('N') },
		"place 200 of the memo": func(v *snapshot) { v.get(200) },
		"items at once": func(v *snapshot) {
			v.events.item()
			for range 1001 {
				v.int(1)
			}
		},
	} {
		var out bytes.Buffer
		v := &snapshot{pickle: newPickle(bufio.NewWriter(&out)), places: newPlaces(1<<20, &trace.Trace{}, memory.Device)}
		v.op(opProto)
		v.op(pickleFormat)
		v.dict()
		v.str("device_traces")
		all := v.list()
		all.item()
		v.events = v.list()
		plant(v)
		if what != "no category" && what != "is nonsense" && v.events.n > 0 {
			v.mark()
		}
		v.events.end()
		all.end()
		v.segments()
		v.endDict()
		v.op(opStop)
		if err := v.out.Flush(); err != nil {
			t.Fatal(err)
		}
		if _, err := screens(out.Bytes()); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: the reader says %v", what, err)
		}
	}
}

// A full memo begins again, and long lists are written in batches.
func TestMemoryVizLong(t *testing.T) {
	const layers = memos + 1000 // so that some come again after that
	in := &trace.Trace{}
	for i := range memos + 5000 {
		e := trace.Event{Kind: trace.Alloc, Storage: 1, Offset: int64(i), Bytes: 7, Layer: i % layers, Name: "g"}
		in.Events = append(in.Events, e)
		e.Kind = trace.Free
		in.Events = append(in.Events, e)
	}
	s := screensOf(t, in)[0]
	if want := 3*(memos+5000) + 2; len(s.actions) != want {
		t.Errorf("there are %d events, not %d", len(s.actions), want)
	}
	for i, e := range s.actions[1 : len(s.actions)-1] {
		if got := num(items(e, "frames")[0].(dict), "line"); got != int64(i/3%layers) {
			t.Fatalf("event %d is of layer %d", i, got)
		}
	}
}

// SPEC S6.5: Python reads the same snapshot.
func TestMemoryVizPython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3 to read the pickle with")
	}
	var out bytes.Buffer
	if err := MemoryViz(&out, []*trace.Trace{aRun(0, 2, 300), aRun(1, 1, 2)}); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "snapshot.pickle")
	if err := os.WriteFile(name, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	// Python's pickletools lists the opcodes.
	const script = `
import json, pickle, pickletools, sys
data = open(sys.argv[1], "rb").read()
print(json.dumps([sorted({op.name for op, _, _ in pickletools.genops(data)}), pickle.loads(data)], sort_keys=True))`
	said, err := exec.Command(python, "-c", script, name).Output()
	if err != nil {
		t.Skipf("python3 does not run here: %v", err)
	}
	var got [2]json.RawMessage
	var ops []string
	if err := json.Unmarshal(said, &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(got[0], &ops); err != nil {
		t.Fatal(err)
	}
	const accepted = " APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST LONG1 LONG_BINGET MARK PROTO SETITEMS STOP BINPUT BINUNICODE LONG_BINPUT "
	for _, op := range ops {
		if !strings.Contains(accepted, " "+op+" ") {
			t.Errorf("the viewer does not know %s", op)
		}
	}
	value, err := unpickle(out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	var theirs any
	if err := json.Unmarshal(got[1], &theirs); err != nil {
		t.Fatal(err)
	}
	want, _ := json.Marshal(plain(value))
	if again, _ := json.Marshal(theirs); !bytes.Equal(again, want) {
		t.Errorf("Python reads %d bytes of JSON, and we %d", len(again), len(want))
	}
}

// plain converts unpickled values to plain lists and maps. Numbers become floats, as in JSON.
func plain(v any) any {
	switch v := v.(type) {
	case dict:
		d := dict{}
		for k, x := range v {
			d[k] = plain(x)
		}
		return d
	case *listing:
		l := make([]any, len(v.items))
		for i, x := range v.items {
			l[i] = plain(x)
		}
		return l
	case int64:
		return float64(v)
	}
	return v
}
