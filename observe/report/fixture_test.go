// This file owns the fixtures of the tests: traces made by hand, and folders of runs.

package report

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

// scribe builds a trace event by event. Each piece of work of compute takes a millisecond.
type scribe struct {
	t     trace.Trace
	now   int64 // of the host
	piece uint64
	inUse [2]int64
}

func newScribe(rank int) *scribe {
	return &scribe{t: trace.Trace{Header: trace.Header{Rank: rank, Compute: "compute", Began: 1}}}
}

// own takes or gives back memory of an owner.
func (s *scribe) own(tier memory.Kind, owner string, n int64) {
	e := trace.Event{Kind: trace.Alloc, Time: s.now, Name: owner, Tier: tier, Offset: -1, Bytes: n}
	if n < 0 {
		e.Kind, e.Bytes = trace.Free, -n
	}
	s.inUse[tier] += n
	e.InUse = s.inUse
	s.t.Events = append(s.t.Events, e)
	s.now += 1000
}

// decide emits a decision.
func (s *scribe) decide(e trace.Event) {
	e.Time, e.First = s.now, s.piece
	s.t.Events = append(s.t.Events, e)
	s.now += 1000
}

// work adds a piece of work of compute, which begins at the millisecond of its number.
func (s *scribe) work(name string) {
	s.t.Events = append(s.t.Events, trace.Event{
		Kind: trace.Launch, Stream: "compute", Name: name, First: s.piece, Last: s.piece + 1, Time: int64(s.piece) * 1e6, Took: 9e5,
	})
	s.piece++
}

func (s *scribe) copies(stream string, tier memory.Kind, at, took, bytes int64) {
	s.t.Events = append(s.t.Events, trace.Event{Kind: trace.Copy, Stream: stream, Tier: tier, Time: at, Took: took, Bytes: bytes})
}

// step adds a step with two storages: one is kept, one is offloaded and reloaded.
func (s *scribe) step(n int, bytes int64) {
	s.decide(trace.Event{Kind: trace.Begin, Step: n})
	s.decide(trace.Event{Kind: trace.Alloc, Step: n, Storage: 1, Offset: 0, Bytes: bytes})
	s.work("linear")
	s.decide(trace.Event{Kind: trace.Save, Step: n, Storage: 1, Name: "qkv_linear", Layer: 2, Bytes: bytes})
	s.decide(trace.Event{Kind: trace.Save, Step: n, Name: "qkv_linear", Layer: 2, Bytes: bytes})
	s.decide(trace.Event{Kind: trace.Alloc, Step: n, Storage: 2, Offset: bytes, Bytes: bytes})
	s.work("attention")
	s.decide(trace.Event{Kind: trace.Save, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Bytes: bytes})
	s.decide(trace.Event{Kind: trace.Alloc, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Tier: memory.Host, Offset: 0, Bytes: bytes})
	s.decide(trace.Event{Kind: trace.Offload, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Bytes: bytes})
	s.copies("offload", memory.Host, int64(s.piece)*1e6, 5e5, bytes)
	s.work("norm")
	s.decide(trace.Event{Kind: trace.Free, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Offset: bytes, Bytes: bytes})
	s.work("head")
	s.decide(trace.Event{Kind: trace.Alloc, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Offset: bytes, Bytes: bytes})
	s.decide(trace.Event{Kind: trace.Reload, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Bytes: bytes})
	s.copies("reload", memory.Device, int64(s.piece)*1e6, 5e5, bytes)
	s.work("head backward")
	s.decide(trace.Event{Kind: trace.Load, Step: n, Name: "core_attn", Layer: 2})
	s.work("attention backward")
	s.decide(trace.Event{Kind: trace.Free, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Tier: memory.Host, Bytes: bytes})
	s.decide(trace.Event{Kind: trace.Free, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Offset: bytes, Bytes: bytes})
	s.work("linear backward")
	s.decide(trace.Event{Kind: trace.Free, Step: n, Storage: 1, Name: "qkv_linear", Layer: 2, Bytes: bytes})
	s.decide(trace.Event{Kind: trace.End, Step: n})
}

// small returns the trace of a rank with three steps, of which the second needs most.
func small(rank int) *scribe {
	s := newScribe(rank)
	s.own(memory.Device, "parameters", 3*mib)
	s.own(memory.Device, trace.HeapOwner(memory.Device), 4*mib)
	s.own(memory.Host, trace.HeapOwner(memory.Host), 2*mib)
	s.step(1, mib)
	s.own(memory.Device, trace.HeapOwner(memory.Device), 2*mib)
	s.step(2, 2*mib)
	s.step(3, mib)
	return s
}

// encode returns the file of a trace.
func encode(t testing.TB, x *trace.Trace) []byte {
	t.Helper()
	var b bytes.Buffer
	w := trace.NewWriter(&b, x.Header, 1<<30)
	for _, e := range x.Events {
		w.Emit(e)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// put writes a file.
func put(t testing.TB, data []byte, path ...string) {
	t.Helper()
	name := filepath.Join(path...)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// The folder of a run with all files.
func folder(t testing.TB, dir, policy string) {
	t.Helper()
	env, err := json.Marshal(Environment{Command: "stowage train --policy " + policy, Began: "2026-01-02T03:04:05Z", Machine: map[string]string{"cpu": "a CPU"}})
	if err != nil {
		t.Fatal(err)
	}
	put(t, env, dir, EnvironmentFile)
	put(t, []byte("policy: "+policy+"\n"), dir, ConfigFile)
	put(t, []byte(`{"step":1,"loss":5.5,"seconds":0.5,"tokens_per_second":100.4,"device_bytes":7,"host_bytes":1,"reruns":0}
{"step":2,"loss":5.25,"seconds":0.25,"tokens_per_second":200,"device_bytes":9,"host_bytes":2,"reruns":1,"spills":3,"eval_loss":5.75}
`), dir, MetricsFile)
	put(t, []byte(`{
  "policy": "`+policy+`", "peak_device_bytes": 9437184, "predicted_device_bytes": 9000000, "final_loss": 5.25, "seconds": 0.75, "finished": true,
  "by_rank": [{"rank": 0, "peak_device_bytes": 9437184, "predicted_device_bytes": 9000000, "policy": [
    {"group": "core_attn", "units": {"offload": 1}, "saved": 1048576, "moved": 1048576, "reason": "offload: its copies hide"}]}]
}
`), dir, SummaryFile)
	put(t, encode(t, &small(0).t), dir, TraceName(0, 0))
}
