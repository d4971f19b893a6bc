package report

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// stacked returns the sum of the series of a tier.
func stacked(m Memory, tier string) []int64 {
	sums := make([]int64, len(m.Time))
	for _, s := range m.Series {
		for i, n := range s.Bytes {
			if s.Tier == tier {
				sums[i] += n
			}
		}
	}
	return sums
}

func series(t *testing.T, m Memory, tier, name string) []int64 {
	t.Helper()
	for _, s := range m.Series {
		if s.Tier == tier && s.Name == name {
			return s.Bytes
		}
	}
	t.Fatalf("there is no series %s of the %s among %+v", name, tier, m.Series)
	return nil
}

// Memory is stacked by tier and group, and the peak is the moment with the most. SPEC S6.5
func TestMemory(t *testing.T) {
	r := NewRank(&small(0).t)
	m := r.Memory
	if m.Peak.Bytes != 9*mib || m.Peak.Step != 2 || m.Peak.Host != 2*mib {
		t.Errorf("the peak is %+v", m.Peak)
	}
	var names []string
	for _, s := range m.Series {
		names = append(names, fmt.Sprintf("%s %s %t %d", s.Tier, s.Name, s.Saved, slices.Max(s.Bytes)/kib))
	}
	want := []string{
		"device parameters false 3072", "device core_attn true 2048", "device qkv_linear true 2048", "device not saved false 2048", "device unused in heap false 6144",
		"host core_attn true 2048", "host unused in heap false 2048",
	}
	slices.Sort(names[1:3])
	if !slices.Equal(names, want) {
		t.Errorf("series are %q, want %q", names, want)
	}
	if got := slices.Max(stacked(m, "device")); got != m.Peak.Bytes {
		t.Errorf("the stack is %d high", got)
	}
	at := slices.Index(m.Time, m.Peak.Time)
	if at < 0 || series(t, m, "device", "unused in heap")[at] != 2*mib {
		t.Errorf("at the peak, %g of %v, the pool is not at its fullest", m.Peak.Time, m.Time)
	}
	// A step begins with its first piece of work of compute and ends with its last.
	if want := []StepTime{{1, 0, 6.9}, {2, 7, 13.9}, {3, 14, 20.9}}; !slices.Equal(r.Steps, want) {
		t.Errorf("steps lie at %+v", r.Steps)
	}
	for _, p := range r.Pools {
		want := map[string][]int64{"activations, device": {2 * mib, 4 * mib, 2 * mib}, "activations, host": {mib, 2 * mib, mib}}[p.Name]
		if !slices.Equal(p.Most, want) || !slices.Equal(p.Steps, []int{1, 2, 3}) || p.Size[2] < p.Most[1] {
			t.Errorf("the pool is %+v", p)
		}
	}
}

// Pages of the stash are one pool in each tier. A step that was rerun counts once.
func TestPages(t *testing.T) {
	s := newScribe(0)
	for _, e := range []trace.Event{
		{Step: 1, Bytes: 3, Offset: 8}, {Step: 1, Tier: memory.Host, Bytes: 1, Offset: 2}, {Step: 2, Bytes: 8, Offset: 8}, {Step: 2, Bytes: 9, Offset: 12},
	} {
		e.Kind = trace.Spill
		s.decide(e)
	}
	for i := range 4 {
		s.decide(trace.Event{Kind: trace.Stash, Name: "fused_group_mlp", Layer: i / 2, Microbatch: i % 2})
	}
	r := NewRank(&s.t)
	if c := r.Policy; len(c) != 1 || c[0].Group != "fused_group_mlp" || c[0].Units["stash"] != 2 || c[0].Saved != 10 || c[0].Moved != 1 {
		t.Errorf("the policy is %+v", c)
	}
	got := r.Pools
	if len(got) != 2 || got[0].Name != "stash pages, device" || !slices.Equal(got[0].Most, []int64{3, 9}) || !slices.Equal(got[0].Size, []int64{8, 12}) || !slices.Equal(got[1].Steps, []int{1}) {
		t.Errorf("pools are %+v", got)
	}
}

// Memory that a device held before its trace began is shown without a name.
func TestMemoryBeforeTheTrace(t *testing.T) {
	s := newScribe(0)
	s.inUse[memory.Device] = 5 * mib
	s.own(memory.Device, "rank 0 weights", mib)
	s.own(memory.Device, "rank 0 weights", -mib)
	m := NewRank(&s.t).Memory
	if m.Peak.Bytes != 6*mib || series(t, m, "device", "not traced")[0] != 5*mib || series(t, m, "device", "weights")[0] != mib {
		t.Errorf("memory is %+v", m)
	}
}

// The parts of a resumed run follow each other, and each begins without memory.
func TestMemoryOfParts(t *testing.T) {
	a, b := small(0), newScribe(0)
	b.own(memory.Device, "parameters", mib)
	b.step(4, kib)
	r := NewRank(&a.t, &b.t)
	if n := len(r.Steps); n != 4 || r.Steps[3].Begin < r.Steps[2].End || r.Steps[3].Step != 4 {
		t.Errorf("steps lie at %+v", r.Steps)
	}
	sums := stacked(r.Memory, "device")
	if last := sums[len(sums)-1]; last != mib || r.Memory.Peak.Bytes != 9*mib {
		t.Errorf("%d bytes are left, and the peak is %+v", last, r.Memory.Peak)
	}
}

// Many owners are joined into few bands with the same sum.
func TestManyOwners(t *testing.T) {
	s := newScribe(0)
	for i := range 40 {
		s.own(memory.Device, fmt.Sprint("owner ", i), int64(100+i))
	}
	m := NewRank(&s.t).Memory
	if len(m.Series) != most || m.Series[most-1].Name != "others" || slices.Max(stacked(m, "device")) != m.Peak.Bytes || m.Peak.Bytes != 40*100+39*20 {
		t.Errorf("%d series, and the peak is %+v", len(m.Series), m.Peak)
	}
}

// If runs wait for each other, samples show the steps and not the pauses.
func TestPauses(t *testing.T) {
	s := newScribe(0)
	for step := 1; step <= 3; step++ {
		s.decide(trace.Event{Kind: trace.Begin, Step: step})
		for i := range 100 {
			s.decide(trace.Event{Kind: trace.Alloc, Step: step, Storage: i + 1, Offset: -1, Bytes: int64(100 - i%2)})
		}
		for i := range 100 {
			s.decide(trace.Event{Kind: trace.Free, Step: step, Storage: i + 1})
		}
		s.decide(trace.Event{Kind: trace.End, Step: step})
		s.now += 1e9
	}
	// 600 events in slots for 300.
	m, _ := memoryOf(newTimeline(make([]int64, 9), []*trace.Trace{&s.t}), 0, 300)
	if n := len(m.Time); n < 250 || n > 301 || m.Peak.Bytes != 9950 {
		t.Errorf("%d samples, and the peak is %+v", n, m.Peak)
	}
}

// model is the obvious way to follow memory.
type model struct {
	owners map[string]int64
	held   map[int]int64
	host   map[int]int64
}

func sum[K comparable](m map[K]int64) (n int64) {
	for _, x := range m {
		n += x
	}
	return n
}

// For any trace, samples are real moments, in order and not too many, and the highest is
// the peak. SPEC S6.5
func TestSamples(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newScribe(0)
		x := model{map[string]int64{}, map[int]int64{}, map[int]int64{}}
		s.decide(trace.Event{Kind: trace.Begin, Step: 1})
		type state struct{ device, host int64 }
		was := map[state]bool{{}: true}
		most := int64(0)
		for range rapid.IntRange(0, 300).Draw(t, "events") {
			id := rapid.IntRange(1, 9).Draw(t, "storage")
			n := rapid.Int64Range(1, 1000).Draw(t, "bytes")
			name := rapid.SampledFrom([]string{"parameters", "moments", "pages"}).Draw(t, "owner")
			switch rapid.IntRange(0, 7).Draw(t, "what") {
			case 0:
				s.own(memory.Device, name, n)
				x.owners[name] += n
			case 1:
				if have := x.owners[name]; have > 0 {
					s.own(memory.Device, name, -have)
					delete(x.owners, name)
				}
			case 2:
				s.decide(trace.Event{Kind: trace.Alloc, Step: 1, Storage: id, Offset: -1, Bytes: n})
				x.held[id] = n
			case 3:
				s.decide(trace.Event{Kind: trace.Free, Step: 1, Storage: id, Bytes: x.held[id]})
				delete(x.held, id)
			case 4:
				s.decide(trace.Event{Kind: trace.Alloc, Step: 1, Storage: id, Tier: memory.Host, Offset: 0, Bytes: n})
				x.host[id] = n
			case 5:
				s.decide(trace.Event{Kind: trace.Save, Step: 1, Storage: id, Name: name})
			case 6:
				s.now += rapid.Int64Range(0, 1e6).Draw(t, "pause")
			case 7: // in a step of its own, with nothing held over
				s.decide(trace.Event{Kind: trace.End, Step: 1})
				clear(x.held)
				clear(x.host)
				was[state{sum(x.owners), 0}] = true
				s.now += rapid.Int64Range(0, 1e7).Draw(t, "wait")
				s.decide(trace.Event{Kind: trace.Begin, Step: 1})
			}
			now := state{sum(x.owners) + sum(x.held), sum(x.host)}
			was[now] = true
			most = max(most, now.device)
		}
		l := newTimeline(make([]int64, 9), []*trace.Trace{&s.t})
		slots := rapid.IntRange(1, 400).Draw(t, "slots")
		m, _ := memoryOf(l, 0, slots)
		if m.Peak.Bytes != most || len(m.Time) > slots+1 || !slices.IsSorted(m.Time) {
			t.Fatalf("%d samples, the peak %d and not %d, at %v", len(m.Time), m.Peak.Bytes, most, m.Time)
		}
		dev, host := stacked(m, "device"), stacked(m, "host")
		for i := range dev {
			if !was[state{dev[i], host[i]}] {
				t.Errorf("sample %d, %d and %d bytes, never was", i, dev[i], host[i])
			}
		}
		if most > 0 && slices.Max(dev) != most {
			t.Errorf("the highest sample is %d and not %d", slices.Max(dev), most)
		}
		if n := len(dev); n > 0 && (dev[n-1] != sum(x.owners)+sum(x.held)) {
			t.Errorf("the end has %d and not %d", dev[n-1], sum(x.owners)+sum(x.held))
		}
	})
}

// A storage that two groups save is counted once, as that of the first, in both tiers.
func TestStorageOfTwoGroups(t *testing.T) {
	l := newLedger(0)
	apply := func(e trace.Event) { l.apply(moment{Event: &e}) }
	apply(trace.Event{Kind: trace.Alloc, Storage: 1, Bytes: 100})
	apply(trace.Event{Kind: trace.Save, Storage: 1, Name: "first"})
	apply(trace.Event{Kind: trace.Save, Storage: 1, Name: "second"})
	apply(trace.Event{Kind: trace.Alloc, Storage: 1, Tier: memory.Host, Bytes: 100})
	apply(trace.Event{Kind: trace.Save, Storage: 1, Name: "third"})
	for i, b := range l.bands {
		want := int64(0)
		if b.kind == group && b.name == "first" {
			want = 100
		}
		if l.now[i] != want {
			t.Errorf("%+v holds %d, want %d", b, l.now[i], want)
		}
	}
	if l.total != [2]int64{100, 100} {
		t.Errorf("%v in all", l.total)
	}
}
