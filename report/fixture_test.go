// This file owns what tests of reports share: traces made by hand, and the folders of
// runs.

package report

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stowage-dev/stowage/trace"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

// scribe makes a trace event by event: compute works piece by piece, a millisecond each.
type scribe struct {
	t     trace.Trace
	now   int64 // of the host
	piece uint64
	inUse [2]int64
}

func newScribe(rank int) *scribe {
	return &scribe{t: trace.Trace{Header: trace.Header{Rank: rank, Compute: "compute", Began: 1}}}
}

// own takes or gives back memory of the device.
func (s *scribe) own(tier trace.Tier, owner string, n int64) {
	e := trace.Event{What: trace.Alloc, Time: s.now, Name: owner, Tier: tier, Offset: -1, Bytes: n}
	if n < 0 {
		e.What, e.Bytes = trace.Free, -n
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

// work lets compute do a piece of work, which begins on the millisecond of its number.
func (s *scribe) work(name string) {
	s.t.Events = append(s.t.Events, trace.Event{
		What: trace.Launch, Stream: "compute", Name: name, First: s.piece, Last: s.piece + 1, Time: int64(s.piece) * 1e6, Took: 9e5,
	})
	s.piece++
}

func (s *scribe) copies(stream string, tier trace.Tier, at, took, bytes int64) {
	s.t.Events = append(s.t.Events, trace.Event{What: trace.Copy, Stream: stream, Tier: tier, Time: at, Took: took, Bytes: bytes})
}

// step is a step with two storages: one stays, one leaves and comes back.
func (s *scribe) step(n int, bytes int64) {
	s.decide(trace.Event{What: trace.Begin, Step: n})
	s.decide(trace.Event{What: trace.Alloc, Step: n, Storage: 1, Offset: 0, Bytes: bytes})
	s.work("linear")
	s.decide(trace.Event{What: trace.Save, Step: n, Storage: 1, Name: "qkv_linear", Layer: 2, Bytes: bytes})
	s.decide(trace.Event{What: trace.Save, Step: n, Name: "qkv_linear", Layer: 2, Bytes: bytes})
	s.decide(trace.Event{What: trace.Alloc, Step: n, Storage: 2, Offset: bytes, Bytes: bytes})
	s.work("attention")
	s.decide(trace.Event{What: trace.Save, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Bytes: bytes})
	s.decide(trace.Event{What: trace.Alloc, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Tier: trace.Host, Offset: 0, Bytes: bytes})
	s.decide(trace.Event{What: trace.Leave, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Bytes: bytes})
	s.copies("offload", trace.Host, int64(s.piece)*1e6, 5e5, bytes)
	s.work("norm")
	s.decide(trace.Event{What: trace.Free, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Offset: bytes, Bytes: bytes})
	s.work("head")
	s.decide(trace.Event{What: trace.Alloc, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Offset: bytes, Bytes: bytes})
	s.decide(trace.Event{What: trace.Return, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Bytes: bytes})
	s.copies("reload", trace.Device, int64(s.piece)*1e6, 5e5, bytes)
	s.work("head backward")
	s.decide(trace.Event{What: trace.Load, Step: n, Name: "core_attn", Layer: 2})
	s.work("attention backward")
	s.decide(trace.Event{What: trace.Free, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Tier: trace.Host, Bytes: bytes})
	s.decide(trace.Event{What: trace.Free, Step: n, Storage: 2, Name: "core_attn", Layer: 2, Offset: bytes, Bytes: bytes})
	s.work("linear backward")
	s.decide(trace.Event{What: trace.Free, Step: n, Storage: 1, Name: "qkv_linear", Layer: 2, Bytes: bytes})
	s.decide(trace.Event{What: trace.End, Step: n})
}

// small is a rank of three steps, the second of which takes most.
func small(rank int) *scribe {
	s := newScribe(rank)
	s.own(trace.Device, "parameters", 3*mib)
	s.own(trace.Device, trace.Device.Pool(), 4*mib)
	s.own(trace.Host, trace.Host.Pool(), 2*mib)
	s.step(1, mib)
	s.own(trace.Device, trace.Device.Pool(), 2*mib)
	s.step(2, 2*mib)
	s.step(3, mib)
	return s
}

// encode is a trace as it is written.
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

// A run's folder with everything in it.
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
