package fsdp

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
)

// anySpec draws units, some of them loose, and an order with any nesting.
func anySpec(t *rapid.T) bucket.Spec {
	s := bucket.Spec{
		Align: 256, Multiple: 8,
		Prefetch: rapid.IntRange(0, 3).Draw(t, "prefetch"),
		Behind:   rapid.IntRange(0, 2).Draw(t, "behind"),
	}
	for i := range rapid.IntRange(1, 6).Draw(t, "units") {
		u := bucket.FSDPUnit{Name: fmt.Sprint("unit ", i), Loose: rapid.IntRange(0, 3).Draw(t, "loose") == 0}
		for b := range rapid.IntRange(1, 3).Draw(t, "buckets") {
			u.Buckets = append(u.Buckets, bucket.Bucket{
				Name: fmt.Sprint("bucket ", b), Type: rapid.SampledFrom([]bucket.Type{BF16, FP32}).Draw(t, "type"),
				Elements: rapid.Int64Range(1, 400).Draw(t, "elements"),
			})
		}
		s.Units = append(s.Units, u)
	}
	var open []int
	release := func(i int) {
		s.Order = append(s.Order, bucket.OrderEntry{Unit: open[i], Release: true})
		open = slices.Delete(open, i, i+1)
	}
	for range rapid.IntRange(1, 20).Draw(t, "events") {
		u := rapid.IntRange(0, len(s.Units)-1).Draw(t, "unit")
		if i := slices.Index(open, u); i >= 0 {
			release(i)
		} else {
			open, s.Order = append(open, u), append(s.Order, bucket.OrderEntry{Unit: u})
		}
	}
	for len(open) > 0 {
		release(rapid.IntRange(0, len(open)-1).Draw(t, "released"))
	}
	return s
}

// solo is a single pool, with memory and lanes of its own.
type solo struct {
	*pool
	set *lanes
}

func newSolo(dev device.Device, plan *bucket.PoolPlan, log *slog.Logger) (*solo, error) {
	var buf *device.Buffer
	if n := plan.Bytes - plan.Dynamic; n > 0 {
		var err error
		if buf, err = dev.Alloc(memory.Device, memory.Bytes(n), "pool"); err != nil {
			return nil, err
		}
	}
	set := newLanes(dev)
	p, err := newPool(set, buf, plan, "pool", log)
	return &solo{p, set}, err
}

func (p *solo) acquire(use int, s device.Stream) (lease, error) {
	return p.pool.acquire(use, p.set.Lane(s))
}
func (p *solo) release(l lease, s device.Stream) { l.release(p.set.Lane(s)) }

func (p *solo) close(s device.Stream) error {
	err := p.set.Sync()
	p.reset(s)
	if p.buf != nil {
		s.Free(p.buf)
	}
	return errors.Join(err, p.set.close(s))
}

// poolModel drives a pool through its plan beside an obvious model: an owner for each
// byte. The first half of a use writes on one stream, and the second half reads on
// another, as gathers and computations do.
type poolModel struct {
	dev    device.Device
	plan   *bucket.PoolPlan
	pool   *solo
	in, on device.Stream
	filled []device.Event  // by use
	owner  map[uintptr]int // by address of a byte, while it is held
	at     map[int]uintptr // where a use lay in the rounds before
	leases map[int]lease
	wrong  atomic.Int64
}

func newPoolModel(dev device.Device, plan *bucket.PoolPlan) (m *poolModel, err error) {
	m = &poolModel{dev: dev, plan: plan, owner: map[uintptr]int{}, at: map[int]uintptr{}, leases: map[int]lease{}}
	if m.in, err = dev.NewStream("in"); err != nil {
		return nil, err
	}
	if m.on, err = dev.NewStream("on"); err != nil {
		return nil, err
	}
	for range plan.Uses {
		e, err := dev.NewEvent(0)
		if err != nil {
			return nil, err
		}
		m.filled = append(m.filled, e)
	}
	m.pool, err = newSolo(dev, plan, nil)
	return m, err
}

// get leases a use and fills its bytes.
func (m *poolModel) get(use, round int) error {
	l, err := m.pool.acquire(use, m.in)
	if err != nil {
		return err
	}
	m.leases[use] = l
	spec := m.plan.Spec
	for b, of := range spec.Units[m.plan.Uses[use].Unit].Buckets {
		r := l.bucket(b)
		if r.Len != spec.PaddedBytes(of) || r.Addr()%256 != 0 {
			return fmt.Errorf("bucket %d of use %d is %v at %#x", b, use, r.Len, r.Addr())
		}
		for a := r.Addr(); a < r.Addr()+uintptr(r.Len); a++ {
			if other, taken := m.owner[a]; taken {
				return fmt.Errorf("uses %d and %d hold the same byte", other, use)
			}
			m.owner[a] = use
		}
		if !m.plan.Places[use][b].Dynamic {
			if was, known := m.at[use<<8+b]; known && was != r.Addr() {
				return fmt.Errorf("bucket %d of use %d moved from %#x to %#x", b, use, was, r.Addr())
			}
			m.at[use<<8+b] = r.Addr()
		}
		m.in.Fill(r, byte(use*16+round))
	}
	m.in.Record(m.filled[use])
	return nil
}

// put reads what the use wrote and ends its lease.
func (m *poolModel) put(use, round int) {
	l := m.leases[use]
	m.on.Wait(m.filled[use])
	for b := range m.plan.Places[use] {
		r := l.bucket(b)
		addr, n, want := uint64(r.Addr()), int(r.Len), byte(use*16+round)
		m.on.Host(func() {
			if slices.ContainsFunc(device.Slice[byte](addr, n), func(x byte) bool { return x != want }) {
				m.wrong.Add(1)
			}
		}, device.Reads(r))
		for a := r.Addr(); a < r.Addr()+uintptr(r.Len); a++ {
			delete(m.owner, a)
		}
	}
	m.pool.release(l, m.on)
	delete(m.leases, use)
}

// round goes through the plan's order once. It leases a use when the plan allows it to be
// gathered.
func (m *poolModel) round(round int) error {
	due := make([][]int, len(m.plan.Uses))
	under := map[int]int{}
	for i, u := range m.plan.Uses {
		first := u.Gather
		if u.Kept {
			first = i
		}
		due[first] = append(due[first], i)
	}
	next := 0
	for _, e := range m.plan.Spec.Order {
		if e.Release {
			m.put(under[e.Unit], round)
			continue
		}
		for _, use := range due[next] {
			if err := m.get(use, round); err != nil {
				return err
			}
		}
		under[e.Unit] = next
		next++
	}
	if len(m.owner) > 0 || len(m.leases) > 0 {
		return fmt.Errorf("after a round %d bytes are held", len(m.owner))
	}
	return nil
}

func (m *poolModel) close() error {
	err := m.dev.Sync()
	if m.pool != nil {
		err = errors.Join(err, m.pool.close(m.in))
	}
	for _, e := range m.filled {
		err = errors.Join(err, e.Close())
	}
	err = errors.Join(err, m.in.Close(), m.on.Close())
	if n := m.wrong.Load(); n > 0 {
		err = errors.Join(err, fmt.Errorf("%d buckets held something else than was written", n))
	}
	return err
}

func poolProgram(plan *bucket.PoolPlan, rounds int) check.Program {
	return check.On(cpuDevice, func(dev device.Device) error {
		m, err := newPoolModel(dev, plan)
		for round := 0; err == nil && round < rounds; round++ {
			err = m.round(round)
		}
		return errors.Join(err, m.close())
	})
}

// SPEC S2.1, S2.7, S6.2: for all pools and orders, nobody gets bytes that another holds,
// reads return what was written, nothing moves, and no wait is missing.
func TestPoolAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		kind := rapid.SampledFrom(bucket.PoolKinds[:]).Draw(t, "kind")
		o := bucket.Options{Fallback: rapid.SampledFrom([]bucket.Fallback{bucket.Persistent, bucket.DynamicMemory}).Draw(t, "fallback")}
		spec := anySpec(t)
		plan, err := bucket.NewPoolPlan(kind, spec, o)
		if err != nil {
			if kind == bucket.Max && spec.Prefetch+spec.Behind == 0 {
				t.Skip("no double buffer")
			}
			t.Fatal(err)
		}
		if err := check.Explore(check.Options{}, 2, poolProgram(plan, 3)); err != nil {
			t.Fatal(err)
		}
	})
}

// straight returns a plan for units that are used one after the other and then in
// reverse.
func straight(t testing.TB, kind bucket.PoolKind, o bucket.Options, elements ...int64) *bucket.PoolPlan {
	s := bucket.Spec{Align: 256, Multiple: 8, Prefetch: 1}
	for i, n := range elements {
		s.Units = append(s.Units, bucket.FSDPUnit{Name: fmt.Sprint("unit ", i), Buckets: []bucket.Bucket{{Name: "dense", Type: BF16, Elements: n}}})
	}
	for i := range 2 * len(elements) {
		u := min(i, 2*len(elements)-1-i)
		s.Order = append(s.Order, bucket.OrderEntry{Unit: u}, bucket.OrderEntry{Unit: u, Release: true})
	}
	plan, err := bucket.NewPoolPlan(kind, s, o)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// SPEC S6.2: the checker notices if any wait of a pool is dropped.
func TestPoolWaitsAreNeeded(t *testing.T) {
	t.Parallel()
	for i, kind := range bucket.PoolKinds {
		if testing.Short() && i%3 != 1 {
			continue
		}
		edges, err := check.DropEach(check.Waits, 0, poolProgram(straight(t, kind, bucket.Options{}, 40, 900, 333, 40, 64), 3))
		if err != nil {
			t.Fatal(err)
		}
		t.Log(kind, edges)
		if edges.Caught != edges.Total || edges.Total == 0 {
			t.Error(kind, "has a wait that nobody misses")
		}
	}
}

func openPool(t *testing.T, plan *bucket.PoolPlan, log *slog.Logger) (device.Device, device.Stream, *solo) {
	t.Helper()
	dev, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	s, err := dev.NewStream("s")
	if err != nil {
		t.Fatal(err)
	}
	p, err := newSolo(dev, plan, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(p.close(s), s.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
	return dev, s, p
}

// SPEC S2.1: getting and putting allocate nothing, and addresses on a frozen device stay
// the same.
func TestPoolAllocatesNothing(t *testing.T) {
	for _, kind := range bucket.PoolKinds[1:] {
		dev, s, p := openPool(t, straight(t, kind, bucket.Options{}, 40, 900, 333, 40), nil)
		dev.Freeze()
		other, err := dev.NewStream("other")
		if err != nil {
			t.Fatal(err)
		}
		round := func() {
			for use := range p.uses {
				l, _ := p.acquire(use, s)
				_ = l.bucket(0)
				p.release(l, other)
			}
		}
		round()
		if n := testing.AllocsPerRun(20, round); n != 0 {
			t.Errorf("%v: %v allocations a round", kind, n)
		}
		if err := errors.Join(dev.Sync(), p.lanes.Sync()); err != nil {
			t.Error(err)
		}
	}
}

// SPEC S2.3: misuse panics with one sentence.
func TestPoolMisuse(t *testing.T) {
	_, s, p := openPool(t, straight(t, bucket.Arena, bucket.Options{}, 40, 900, 333, 40), nil)
	a, err := p.acquire(0, s)
	if err != nil {
		t.Fatal(err)
	}
	mustPanic(t, `fsdp: use 0 of pool "pool" is acquired twice; release it first`, func() { _, _ = p.acquire(0, s) })
	former := p.uses[7].former[0]
	mustPanic(t, fmt.Sprintf(`fsdp: use 7 of pool "pool" is acquired out of turn; release use %d first, which has the same bytes`, former),
		func() { _, _ = p.acquire(7, s) })
	p.release(a, s)
	const stale = `fsdp: use 0 of pool "pool" was released; its bytes may belong to another use; use them before Done`
	mustPanic(t, stale, func() { p.release(a, s) })
	mustPanic(t, stale, func() { a.bucket(0) })
	for use := 1; use < len(p.uses); use++ {
		l, _ := p.acquire(use, s)
		p.release(l, s)
	}
	if _, err := p.acquire(0, s); err != nil {
		t.Fatal(err)
	}
	mustPanic(t, stale, func() { a.bucket(0) }) // it belongs to another round
}

// SPEC S2.3: a lease of a step that was given up stays stale for ever, whether its use
// was held or released then, and all uses are in the same round again.
func TestPoolResetEndsLeases(t *testing.T) {
	_, s, p := openPool(t, straight(t, bucket.Arena, bucket.Options{}, 40, 900, 333, 40), nil)
	take := func(use int) lease {
		t.Helper()
		l, err := p.acquire(use, s)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	for released := range 3 {
		var old []lease
		for use := range released + 1 {
			if old = append(old, take(use)); use < released {
				p.release(old[use], s)
			}
		}
		p.reset(s)
		for use := range p.uses {
			l := take(use)
			for _, was := range old {
				mustPanic(t, fmt.Sprintf(`fsdp: use %d of pool "pool" was released; its bytes may belong to another use; use them before Done`, was.use), func() { was.bucket(0) })
			}
			p.release(l, s)
		}
	}
}

// SPEC S2.3: a bucket that cannot keep its place is logged once, with both places.
func TestPoolLogsMoves(t *testing.T) {
	var said strings.Builder
	spec := straight(t, bucket.Rotary, bucket.Options{}, 40, 900, 333).Spec
	spec.Units[1].Buckets = append(spec.Units[1].Buckets, bucket.Bucket{Name: "second", Type: spec.Units[1].Buckets[0].Type, Elements: 50})
	spec.Order = slices.Concat(spec.Order[:6], spec.Order[:6], spec.Order[:6]) // three units take turns in two blocks
	plan, err := bucket.NewPoolPlan(bucket.Rotary, spec, bucket.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(plan.Moves) != 8 {
		t.Fatal("each bucket should move twice: ", plan.Moves)
	}
	_, s, p := openPool(t, plan, slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelDebug})))
	for range 3 {
		for use := range p.uses {
			l, _ := p.acquire(use, s)
			p.release(l, s)
		}
	}
	moved := map[[2]int]bool{}
	for _, m := range plan.Moves {
		if moved[[2]int{m.Unit, m.Bucket}] {
			continue
		}
		moved[[2]int{m.Unit, m.Bucket}] = true
		if text := strings.ReplaceAll(plan.Describe(m), `"`, `\"`); strings.Count(said.String(), text) != 1 {
			t.Errorf("%q does not say once: %s", said.String(), text)
		}
	}
	if n := strings.Count(said.String(), "level=DEBUG"); n != len(moved) {
		t.Errorf("%d messages for debugging for %d buckets that move", n, len(moved))
	}
}

// A use waits once for each use that had its bytes before, even if they share several
// buckets.
func TestPoolWaitsOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spec := anySpec(t)
		plan, err := bucket.NewPoolPlan(bucket.Recorded, spec, bucket.Options{})
		if err != nil {
			t.Fatal(err)
		}
		dev, err := cpuDevice()
		if err != nil {
			t.Fatal(err)
		}
		s, err := dev.NewStream("test")
		if err != nil {
			t.Fatal(err)
		}
		p, err := newSolo(dev, plan, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i, u := range p.uses {
			slices.Sort(u.former)
			if n := len(u.former); len(slices.Compact(u.former)) != n {
				t.Fatalf("use %d waits for %v", i, u.former)
			}
		}
		if err := errors.Join(p.close(s), s.Close(), dev.Close()); err != nil {
			t.Fatal(err)
		}
	})
}

// fewEvents is a device that refuses events once it has made some.
type fewEvents struct {
	device.Device
	left, made int
}

func (d *fewEvents) NewEvent(f device.EventFlags) (device.Event, error) {
	if d.left == 0 {
		return nil, errors.New("no more events")
	}
	d.left--
	d.made++
	return d.Device.NewEvent(f)
}

// A pool that could not be made leaves its events to the next: there are as many as a pool
// has uses, however often it failed.
func TestFailedPoolLeavesItsEvents(t *testing.T) {
	dev, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	spec := bucket.Spec{Align: 256, Multiple: 8, Prefetch: 1}
	for i := range 4 {
		spec.Units = append(spec.Units, bucket.FSDPUnit{Name: fmt.Sprint("unit ", i), Buckets: []bucket.Bucket{{Name: "b", Type: BF16, Elements: 64}}})
		spec.Order = append(spec.Order, bucket.OrderEntry{Unit: i}, bucket.OrderEntry{Unit: i, Release: true})
	}
	plan, err := bucket.NewPoolPlan(bucket.Arena, spec, bucket.Options{})
	if err != nil {
		t.Fatal(err)
	}
	buf, err := dev.Alloc(memory.Device, plan.Bytes, "pool")
	if err != nil {
		t.Fatal(err)
	}
	few := &fewEvents{Device: dev}
	set := newLanes(few)
	for range plan.Uses {
		few.left = 1
		if _, err := newPool(set, buf, plan, "pool", nil); (err == nil) != (few.made == len(plan.Uses)) {
			t.Fatalf("with %d events of %d: %v", few.made, len(plan.Uses), err)
		}
	}
	s, err := dev.NewStream("free")
	if err != nil {
		t.Fatal(err)
	}
	s.Free(buf)
	if err := errors.Join(set.close(s), s.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}
