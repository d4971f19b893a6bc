// This file owns the tests of the accounting: the conservation law beside an
// obvious model, the freeze, and the words of leaks.

package devicekit_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

// grant is memory that the model knows to be handed out.
type grant struct {
	kind    memory.Kind
	size    memory.Bytes
	owner   string
	pending bool
}

// ledgerModel is a list of grants and the highest sums it ever had. Everything
// a ledger says follows from it.
type ledgerModel struct {
	ledger    *devicekit.Ledger
	capacity  [memory.Kinds]memory.Bytes
	grants    []grant
	peak      [memory.Kinds]memory.Bytes
	ownerPeak map[device.OwnerUsage]memory.Bytes // by owner and kind
}

var owners = []string{"stash", "offload", "bucket"}

func (m *ledgerModel) sum(match func(grant) bool) (n memory.Bytes) {
	for _, g := range m.grants {
		if match(g) {
			n += g.size
		}
	}
	return n
}

func (m *ledgerModel) ofKind(k memory.Kind) memory.Bytes {
	return m.sum(func(g grant) bool { return g.kind == k })
}

func (m *ledgerModel) ofOwner(k memory.Kind, owner string) memory.Bytes {
	return m.sum(func(g grant) bool { return g.kind == k && g.owner == owner })
}

// granted enters a grant and moves the peaks.
func (m *ledgerModel) granted(g grant) {
	m.grants = append(m.grants, g)
	key := device.OwnerUsage{Owner: g.owner, Kind: g.kind}
	m.peak[g.kind] = max(m.peak[g.kind], m.ofKind(g.kind))
	m.ownerPeak[key] = max(m.ownerPeak[key], m.ofOwner(g.kind, g.owner))
}

// take asks for memory through Alloc or Grow; both follow one rule.
func (m *ledgerModel) take(t *rapid.T, ask func(memory.Kind, memory.Bytes, string) error) {
	g := grant{
		kind:  memory.Kind(rapid.IntRange(0, memory.Kinds-1).Draw(t, "kind")),
		size:  memory.Bytes(rapid.IntRange(0, 60).Draw(t, "size")),
		owner: rapid.SampledFrom(owners).Draw(t, "owner"),
	}
	free := m.capacity[g.kind] - m.ofKind(g.kind)
	err := ask(g.kind, g.size, g.owner)
	if g.size <= free {
		if err != nil {
			t.Fatalf("%v of %v free, and yet: %v", g.size, free, err)
		}
		m.granted(g)
		return
	}
	var oom *device.OutOfMemory
	if !errors.As(err, &oom) {
		t.Fatalf("asked for %v of %v free and got %v", g.size, free, err)
	}
	if oom.Device != "model" || oom.Kind != g.kind || oom.Owner != g.owner || oom.Asked != g.size || oom.Free != free || oom.Capacity != m.capacity[g.kind] {
		t.Fatalf("the error says %+v; %v was free", oom, free)
	}
	m.checkHolders(t, oom)
}

// checkHolders: the error's table is all memory of the kind, largest first.
func (m *ledgerModel) checkHolders(t *rapid.T, oom *device.OutOfMemory) {
	var total memory.Bytes
	for i, o := range oom.Owners {
		if o.Current == 0 || o.Current != m.ofOwner(oom.Kind, o.Owner) || i > 0 && o.Current > oom.Owners[i-1].Current {
			t.Fatalf("the table of holders is %v", oom.Owners)
		}
		total += o.Current
	}
	if total+oom.Free != oom.Capacity {
		t.Fatalf("%v held and %v free do not make %v", total, oom.Free, oom.Capacity)
	}
}

// pick returns the place of a grant that is or is not pending, or -1.
func (m *ledgerModel) pick(t *rapid.T, pending bool) int {
	var at []int
	for i, g := range m.grants {
		if g.pending == pending {
			at = append(at, i)
		}
	}
	if len(at) == 0 {
		return -1
	}
	return rapid.SampledFrom(at).Draw(t, "grant")
}

// check holds the ledger against the model and the model against the law.
func (m *ledgerModel) check(t *rapid.T) {
	u := m.ledger.Usage()
	for k := range memory.Kind(memory.Kinds) {
		pending := m.sum(func(g grant) bool { return g.kind == k && g.pending })
		want := device.KindUsage{Current: m.ofKind(k), Pending: pending, Peak: m.peak[k], Capacity: m.capacity[k]}
		if u.Kind[k] != want {
			t.Fatalf("%v memory: ledger %+v, model %+v", k, u.Kind[k], want)
		}
		live := m.sum(func(g grant) bool { return g.kind == k && !g.pending })
		if free := u.Kind[k].Capacity - u.Kind[k].Current; free < 0 || live+u.Kind[k].Pending+free != u.Kind[k].Capacity {
			t.Fatalf("%v memory: live %v + pending %v + free %v is not the capacity %v", k, live, u.Kind[k].Pending, free, u.Kind[k].Capacity)
		}
	}
	seen := map[device.OwnerUsage]memory.Bytes{}
	for i, o := range u.Owners {
		if want := m.ofOwner(o.Kind, o.Owner); o.Current != want {
			t.Fatalf("%q has %v of %v memory, want %v", o.Owner, o.Current, o.Kind, want)
		}
		seen[device.OwnerUsage{Owner: o.Owner, Kind: o.Kind}] = o.Peak
		if i > 0 && (o.Kind < u.Owners[i-1].Kind || o.Kind == u.Owners[i-1].Kind && o.Peak > u.Owners[i-1].Peak) {
			t.Fatalf("owners are not ordered by kind and peak: %v", u.Owners)
		}
	}
	if !maps.Equal(seen, m.ownerPeak) {
		t.Fatalf("peaks by owner are %v, want %v", seen, m.ownerPeak)
	}
	for k := range memory.Kind(memory.Kinds) {
		free := m.capacity[k] - m.ofKind(k)
		oom := m.ledger.OutOfMemory(k, 7, free, "asker")
		if pending := u.Kind[k].Pending; oom.Kind != k || oom.Asked != 7 || oom.Owner != "asker" || oom.Pending != pending {
			t.Fatalf("the error says %+v; %v is pending", oom, pending)
		}
		m.checkHolders(t, oom)
	}
	if leaks := m.ledger.Leaks(); (leaks != nil) != (m.ofKind(memory.Device)+m.ofKind(memory.Host) > 0) {
		t.Fatalf("with %v handed out, Leaks is %v", m.grants, leaks)
	}
}

// SPEC S6.2: memory is accounted for exactly, by kind and by owner.
func TestLedgerConservation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &ledgerModel{capacity: [memory.Kinds]memory.Bytes{200, 100}, ownerPeak: map[device.OwnerUsage]memory.Bytes{}}
		m.ledger = devicekit.NewLedger("model", m.capacity)
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) { m.take(t, m.ledger.Alloc) },
			"grow":  func(t *rapid.T) { m.take(t, m.ledger.Grow) },
			"pend": func(t *rapid.T) {
				if i := m.pick(t, false); i >= 0 {
					m.ledger.MarkPending(m.grants[i].kind, m.grants[i].size)
					m.grants[i].pending = true
				}
			},
			"release": func(t *rapid.T) {
				if i := m.pick(t, true); i >= 0 {
					g := m.grants[i]
					m.ledger.Release(g.kind, g.size, g.owner)
					m.grants = slices.Delete(m.grants, i, i+1)
				}
			},
			"undo": func(t *rapid.T) {
				if i := m.pick(t, false); i >= 0 {
					g := m.grants[i]
					m.ledger.Undo(g.kind, g.size, g.owner)
					m.grants = slices.Delete(m.grants, i, i+1)
				}
			},
			"": m.check,
		})
	})
}

func newLedger() *devicekit.Ledger {
	return devicekit.NewLedger("cpu:0", [memory.Kinds]memory.Bytes{1000, 500})
}

func TestLedgerFreeze(t *testing.T) {
	l := newLedger()
	if err := l.Alloc(memory.Host, 0, "pool"); err != nil {
		t.Fatal(err)
	}
	l.Freeze()
	before := fmt.Sprint(l.Usage())
	wantPanic(t, `"late" allocates 10 B of device memory after the freeze`, func() { _ = l.Alloc(memory.Device, 10, "late") })
	wantPanic(t, "after the freeze", func() { _ = l.Alloc(memory.Device, 0, "late") })
	if got := fmt.Sprint(l.Usage()); got != before {
		t.Errorf("a refused allocation changed the ledger from %s to %s", before, got)
	}
	if err := l.Grow(memory.Host, 500, "pool"); err != nil {
		t.Errorf("growing after the freeze: %v", err)
	}
	var oom *device.OutOfMemory
	if err := l.Grow(memory.Host, 1, "pool"); !errors.As(err, &oom) {
		t.Errorf("growing beyond the capacity gives %v", err)
	}
}

func TestLedgerPanics(t *testing.T) {
	wantPanic(t, `"x" asked for -1 bytes of device memory`, func() { _ = newLedger().Alloc(memory.Device, -1, "x") })
	wantPanic(t, `"x" asked for 1 bytes of Kind(2) memory`, func() { _ = newLedger().Alloc(memory.Kinds, 1, "x") })

	held := func() *devicekit.Ledger {
		l := newLedger()
		if err := errors.Join(l.Alloc(memory.Device, 100, "a"), l.Alloc(memory.Device, 50, "b")); err != nil {
			t.Fatal(err)
		}
		return l
	}
	const law = "that were not handed out"
	wantPanic(t, "151 B of device memory pending, but only 150 B handed out", func() { held().MarkPending(memory.Device, 151) })
	wantPanic(t, law, func() { held().Release(memory.Device, 100, "a") }) // never pended
	wantPanic(t, law, func() { held().Undo(memory.Device, 101, "a") })    // more than the owner has
	wantPanic(t, law, func() { held().Undo(memory.Device, 10, "c") })     // an owner who never had any
	wantPanic(t, law, func() { held().Undo(memory.Host, 10, "a") })       // the other kind
	l := held()
	l.MarkPending(memory.Device, 120)
	wantPanic(t, law, func() { l.Undo(memory.Device, 50, "b") }) // only 30 of the 150 are live
}

func TestLedgerMachineOutOfMemory(t *testing.T) {
	l := newLedger()
	if err := l.Alloc(memory.Device, 300, "weights"); err != nil {
		t.Fatal(err)
	}
	oom := l.OutOfMemory(memory.Device, 200, 64, "stash")
	want := `cpu:0: out of device memory: "stash" asked for 200 B, but only 64 B of 1000 B are free; held by "weights" 300 B; free some of it or ask for less`
	if oom.Error() != want {
		t.Errorf("says\n %s\nwant\n %s", oom, want)
	}
}

func TestLedgerLeaks(t *testing.T) {
	l := newLedger()
	if err := errors.Join(l.Alloc(memory.Host, 30, "small"), l.Alloc(memory.Host, 70, "big"), l.Alloc(memory.Device, 0, "none")); err != nil {
		t.Fatal(err)
	}
	want := `cpu:0: 100 B of host memory was never freed; the largest holder is "big" with 70 B`
	if err := l.Leaks(); err == nil || err.Error() != want {
		t.Errorf("Leaks = %v\nwant %s", err, want)
	}
	for owner, n := range map[string]memory.Bytes{"small": 30, "big": 70} {
		l.MarkPending(memory.Host, n)
		if l.Leaks() == nil {
			t.Error("pending memory is no leak, says Leaks")
		}
		l.Release(memory.Host, n, owner)
	}
	if err := l.Leaks(); err != nil {
		t.Error(err)
	}
}

// TestLedgerConcurrently: takers and givers from many goroutines never break
// the law (the ledger would panic) and end at zero.
func TestLedgerConcurrently(t *testing.T) {
	l := newLedger()
	var wg sync.WaitGroup
	for i := range 8 {
		owner := owners[i%len(owners)]
		wg.Go(func() {
			for j := range 200 {
				kind, n := memory.Kind(j%memory.Kinds), memory.Bytes(1+(i+j)%200)
				if err := l.Alloc(kind, n, owner); err != nil {
					if !strings.Contains(err.Error(), "out of") {
						t.Error(err)
					}
					continue
				}
				l.MarkPending(kind, n)
				l.Release(kind, n, owner)
			}
		})
	}
	wg.Wait()
	for k, u := range l.Usage().Kind {
		if u.Current != 0 || u.Pending != 0 || u.Peak == 0 || u.Peak > u.Capacity {
			t.Errorf("%v memory ends as %+v", memory.Kind(k), u)
		}
	}
}

// changes writes down what an observer is told.
type changes struct {
	device.Observer
	told []string
}

func (c *changes) MemoryChanged(kind memory.Kind, owner string, n, current memory.Bytes) {
	c.told = append(c.told, fmt.Sprintf("%v %s %d of %d", kind, owner, int64(n), int64(current)))
}

// An observer is told every change, and nothing that changes nothing.
func TestLedgerObserved(t *testing.T) {
	l, c := devicekit.NewLedger("d", [memory.Kinds]memory.Bytes{100, 200}), &changes{}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(l.Alloc(memory.Device, 1, "unseen"))
	l.Observe(c)
	must(l.Alloc(memory.Device, 10, "a"))
	must(l.Alloc(memory.Host, 20, "b"))
	must(l.Alloc(memory.Host, 0, "nothing"))
	must(l.Grow(memory.Device, 30, "a"))
	l.MarkPending(memory.Device, 5)
	var full *device.OutOfMemory
	if err := l.Alloc(memory.Device, 60, "c"); !errors.As(err, &full) || full.Pending != 5 || full.Free != 59 || full.Asked != 60 || full.Capacity != 100 || full.Owner != "c" || full.Device != "d" || len(full.Owners) != 2 {
		t.Errorf("%+v", full)
	}
	l.Release(memory.Device, 5, "a")
	l.Undo(memory.Host, 15, "b")
	l.Undo(memory.Host, 0, "b")
	l.Observe(nil)
	must(l.Alloc(memory.Device, 2, "unseen"))
	want := "device a 10 of 11, host b 20 of 20, device a 30 of 41, device a -5 of 36, host b -15 of 5"
	if got := strings.Join(c.told, ", "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
