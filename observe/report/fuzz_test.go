// This file owns the fuzz targets of the readers of files, and a trace of a million events.

package report

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// A figure is always a number that JSON can represent.
func FuzzFigures(f *testing.F) {
	f.Add(`{"peak_device_bytes":7,"predicted_device_bytes":8,"a":true,"b":"c","d":null,"e":[{}],"x_us":1e300}`)
	f.Add(`{"a":1e999,"b":-0.5,"": "","a":2`)
	f.Add(`[1]`)
	f.Add(`{"seconds":1e308}`)
	f.Fuzz(func(t *testing.T, text string) {
		defer inputtest.Bound(t, len(text))()
		all := ParseFigures([]byte(text))
		if _, err := json.Marshal(all); err != nil {
			t.Errorf("%q gives figures that cannot be written: %v", text, err)
		}
	})
}

// Each line of metrics is read or counted.
func FuzzMetrics(f *testing.F) {
	f.Add("{\"step\":1,\"loss\":5.5}\n{\"step\":2,\"lo")
	f.Add("{\"step\":1,\"loss\":1e400}\n\n{\"step\":0}\nnull\n")
	f.Add("{\"step\":1,\"seconds\":1e305}\n")
	f.Fuzz(func(t *testing.T, text string) {
		defer inputtest.Bound(t, len(text))()
		lines, bad, err := parseMetrics(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, l := range strings.Split(text, "\n") {
			if len(bytes.TrimSpace([]byte(l))) > 0 {
				n++
			}
		}
		if len(lines)+bad != n {
			t.Errorf("of %d lines %d were read and %d are bad", n, len(lines), bad)
		}
		if _, err := json.Marshal(stepsOf(lines)); err != nil {
			t.Error(err)
		}
	})
}

// events makes a trace of arbitrary bytes, sixteen for each event. Some events are absurd.
func events(data []byte) *trace.Trace {
	s := newScribe(0)
	for len(data) >= 16 {
		b := data[:16]
		data = data[16:]
		at := int64(binary.LittleEndian.Uint64(b[8:])) >> (b[7] % 64)
		s.t.Events = append(s.t.Events, trace.Event{
			Kind: trace.Kind(b[0]) % (trace.Work + 1), Storage: int(b[1]%8) - 1, Tier: memory.Kind(b[2] % 3), Bytes: int64(b[3]) - 1, Step: int(b[4]),
			Name: []string{"", "a", "stash pages", trace.HeapOwner(memory.Device)}[b[5]%4], Stream: []string{"compute", "offload", "reload"}[b[6]%3], Time: at, Took: at >> 3, First: uint64(at) >> 20,
			Offset: int64(b[3]) - 9, InUse: [2]int64{int64(b[1]), at},
		})
	}
	return &s.t
}

// The rank of any trace can be written as JSON. Its axes have equal lengths and are sorted.
func FuzzTrace(f *testing.F) {
	f.Add([]byte(strings.Repeat("\x0e\x02\x00\x09\x01\x01\x00\x08abcdefgh\x00\x01\x00\x00\x01\x01\x01\x30abcdefgh", 9)))
	f.Add(bytes.Repeat([]byte{14, 1, 1, 255, 3, 2, 1, 0, 255, 255, 255, 255, 255, 255, 255, 127}, 3))
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		x := events(data)
		r := NewRank(x, x)
		if _, err := json.Marshal(r); err != nil {
			t.Fatal(err)
		}
		for _, s := range r.Memory.Series {
			if len(s.Bytes) != len(r.Memory.Time) {
				t.Errorf("%s has %d samples of %d", s.Name, len(s.Bytes), len(r.Memory.Time))
			}
		}
		if !slices.IsSorted(r.Memory.Time) || len(r.Memory.Time) > samples+1 {
			t.Errorf("times are %v", r.Memory.Time)
		}
		for _, d := range r.Details {
			for _, s := range d.Storages {
				for _, y := range s.Stays {
					if y.End < y.Begin {
						t.Errorf("a stay is %+v", y)
					}
				}
			}
		}
	})
}

// million returns a trace of a million events: a run of 500 steps.
func million(t testing.TB) []byte {
	s := newScribe(0)
	s.own(memory.Device, "parameters", 3*mib)
	s.own(memory.Device, trace.HeapOwner(memory.Device), 400*mib)
	for step := 1; len(s.t.Events) < 1_000_000; step++ {
		s.decide(trace.Event{Kind: trace.Begin, Step: step})
		for i := range 250 {
			name := []string{"qkv_linear", "core_attn", "attn_proj", "moe_act"}[i%4]
			s.decide(trace.Event{Kind: trace.Alloc, Step: step, Storage: i + 1, Offset: int64(i) * mib, Bytes: mib})
			s.work("forward")
			s.decide(trace.Event{Kind: trace.Save, Step: step, Storage: i + 1, Name: name, Layer: i / 8, Bytes: mib})
			s.decide(trace.Event{Kind: trace.Save, Step: step, Name: name, Layer: i / 8, Bytes: mib})
		}
		for i := range 250 {
			s.decide(trace.Event{Kind: trace.Load, Step: step, Layer: i / 8})
			s.work("backward")
			s.work("gradient")
			s.decide(trace.Event{Kind: trace.Free, Step: step, Storage: 250 - i, Bytes: mib})
		}
		s.decide(trace.Event{Kind: trace.End, Step: step})
	}
	return encode(t, &s.t)
}

// A report of a million events is made in about a second, and shows no more than a page can.
func TestMillion(t *testing.T) {
	if testing.Short() {
		t.Skip("makes a trace of a million events")
	}
	dir := t.TempDir()
	put(t, million(t), dir, TraceName(0, 0))
	r, err := loadRun(dir, 0, beginnings{})
	if err != nil {
		t.Fatal(err)
	}
	k := r.Ranks[0]
	if k.Memory.Peak.Bytes != 403*mib || len(k.Memory.Time) > samples+1 || k.Memory.Events < 600_000 || len(k.Details) != 2 {
		t.Errorf("%d samples of %d events, %d details, the peak %+v", len(k.Memory.Time), k.Memory.Events, len(k.Details), k.Memory.Peak)
	}
	text, err := json.Marshal(r)
	if err != nil || len(text) > 2*mib {
		t.Errorf("%d bytes, %v", len(text), err)
	}
	t.Logf("%d bytes of JSON", len(text))
}

// Reading a trace takes a small multiple of its size: the whole report of 60 000 events
// allocates less than the unpacked events alone would take.
func TestMemoryOfReport(t *testing.T) {
	s := newScribe(0)
	for step := 1; len(s.t.Events) < 60_000; step++ {
		s.decide(trace.Event{Kind: trace.Begin, Step: step})
		for i := range 20 {
			s.decide(trace.Event{Kind: trace.Alloc, Step: step, Storage: i + 1, Offset: int64(i) * mib, Bytes: mib})
			s.work("forward")
			s.decide(trace.Event{Kind: trace.Save, Step: step, Storage: i + 1, Name: "core_attn", Bytes: mib})
			s.decide(trace.Event{Kind: trace.Free, Step: step, Storage: i + 1, Bytes: mib})
		}
		s.decide(trace.Event{Kind: trace.End, Step: step})
	}
	x, err := trace.ReadPacked(bytes.NewReader(encode(t, &s.t)))
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r := NewRank(x)
	runtime.ReadMemStats(&after)
	unpacked := uint64(len(s.t.Events)) * uint64(unsafe.Sizeof(trace.Event{}))
	if got := after.TotalAlloc - before.TotalAlloc; got > unpacked || len(r.Steps) == 0 {
		t.Errorf("%d steps took %d bytes, and the events %d", len(r.Steps), got, unpacked)
	}
}

func BenchmarkMillion(b *testing.B) {
	data := million(b)
	for b.Loop() {
		x, err := trace.Read(bytes.NewReader(data))
		if err != nil {
			b.Fatal(err)
		}
		if err := json.NewEncoder(io.Discard).Encode(NewRank(x)); err != nil {
			b.Fatal(err)
		}
	}
}

// A folder without read permission gives an error.
func TestUnreadable(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("nothing is unreadable for root")
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := loadRun(dir, 0, beginnings{}); err == nil || !strings.Contains(err.Error(), "cannot be read") {
		t.Error(err)
	}
}
