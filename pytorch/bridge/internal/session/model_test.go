// This file owns random training loops of the player's.

package session

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// script is how the steps of a key go: with the same seed it is the same.
type script struct {
	rng  *rand.Rand
	rows bool
	stop int // calls until an exception, or negative
}

var names = []string{"attn", "mlp", "moe", "norm"}

var errStop = errors.New("an exception in the middle")

// step plays one step: some passes forward and back, in several orders.
func (p *player) step(key string, sc script) error {
	p.begin(key)
	err := p.passes(&sc)
	failed := err != nil
	ended := p.end(failed)
	if errors.Is(err, errStop) {
		p.total.early++
		err = nil
	}
	if failed {
		p.total.failed++
	}
	return errors.Join(err, ended)
}

func (p *player) passes(sc *script) error {
	for range 1 + sc.rng.IntN(2) {
		from := len(p.open)
		for range 2 + sc.rng.IntN(6) {
			if err := p.forward(sc); err != nil {
				return err
			}
		}
		if err := p.backward(sc, slices.Clone(p.open[from:])); err != nil {
			return err
		}
	}
	return nil
}

// possible forgives a limit that no plan keeps to: the step ran without one.
func (p *player) possible(err error) error {
	if errors.As(err, new(*TooSmall)) {
		p.total.floor++
		return nil
	}
	return err
}

// due tells whether the exception comes now.
func (sc *script) due() bool { sc.stop--; return sc.stop == -1 }

// forward saves a group: of new storages, of some that were saved before, wherever they
// are, and of some whose groups are all released.
func (p *player) forward(sc *script) error {
	if sc.due() {
		return errStop
	}
	var rs []*record
	name := names[sc.rng.IntN(len(names))]
	for range sc.rng.IntN(5) {
		k, pick := sc.rng.IntN(10), sc.rng.IntN(1<<20)
		switch g := len(p.open); {
		case k == 0 && g > 0 && len(p.open[pick%g].records) > 0:
			rs = append(rs, p.open[pick%g].records[0])
			p.total.again++
		case k == 1 && p.ids > 0 && p.over(uint64(pick)%p.ids+1):
			id, n, row := uint64(pick)%p.ids+1, 1+sc.rng.IntN(3000), 0
			if sc.rows && n%2 == 0 {
				n, row = 24*40, 24
			}
			r := p.fresh(id, n, row)
			r.rows = n % 41
			rs = append(rs, r)
			p.total.anew++
		case k < 4 && sc.rows:
			r := p.fresh(0, 24*40, 24)
			r.rows = p.rng.IntN(41)
			rs = append(rs, r)
		default:
			rs = append(rs, p.fresh(0, 1+sc.rng.IntN(5000), 0))
		}
	}
	return p.save(name, rs, sc.rng.IntN(10) == 0)
}

// over reports whether all groups that saved a storage were released and its memory was
// returned.
func (p *player) over(id uint64) bool {
	for _, g := range p.open {
		if slices.ContainsFunc(g.records, func(r *record) bool { return r.id == id }) {
			return false
		}
	}
	return p.returned[id] == p.borrowed[id] && p.records[id] != nil
}

func (p *player) backward(sc *script, groups []*saved) error {
	switch sc.rng.IntN(4) {
	case 0:
		sc.rng.Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
	case 1:
	default:
		slices.Reverse(groups)
	}
	for _, g := range groups {
		if sc.due() {
			return errStop
		}
		k := sc.rng.IntN(12)
		if k == 0 { // never needed, and perhaps nobody says so
			continue
		}
		for range 1 + k/10 { // some twice, as two passes over one graph do
			if k != 1 {
				if err := p.load(g); err != nil {
					return err
				}
			}
		}
		if k != 2 {
			if err := p.release(g); err != nil {
				return err
			}
		}
	}
	return nil
}

// sessions are the configurations that the model plays against.
func sessions(rng *rand.Rand) (cfg Config, rows bool) {
	cfg = Config{Device: "cpu", Least: memory.Bytes(rng.IntN(2) * 600)}
	switch rng.IntN(4) {
	case 0:
		cfg.Limit = memory.Bytes(6+rng.IntN(70)) * memory.KiB
	case 1:
		cfg.Limit, cfg.Host = memory.Bytes(6+rng.IntN(50))*memory.KiB, memory.Bytes(1+rng.IntN(40))*memory.KiB
	case 2:
		cfg.Policy = map[string]memory.Choice{}
		for _, name := range names {
			cfg.Policy[name] = []memory.Choice{memory.Keep, memory.Offload, memory.Offload, memory.Stash}[rng.IntN(4)]
		}
	}
	if rows = rng.IntN(2) == 0; rows && rng.IntN(2) == 0 {
		cfg.Live = rng.Float64()
	}
	return cfg, rows
}

// SPEC S6.4: whatever a loop does between Begin and End, everything that is loaded is
// bit-equal to what was saved, memory is used only while it is borrowed, it is returned once for
// each time, and nothing is left behind: not by exceptions, not by memory that is not
// to be had, not by a step that departs from those before, nor at the end.
func TestAnyLoop(t *testing.T) {
	moved := 0
	seeds := uint64(30)
	if testing.Short() {
		seeds = 10
	}
	var total player
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			cfg, rows := sessions(rng)
			p := newPlayer(t, rng, cfg)
			for i := range 16 {
				key := []string{"a", "b"}[rng.IntN(2)]
				sc := script{rng: rand.New(rand.NewPCG(seed, uint64(key[0]))), rows: rows, stop: -1}
				switch rng.IntN(6) {
				case 0:
					sc.stop = rng.IntN(10)
				case 1:
					sc.rng = rng // it departs
				case 2:
					p.none = rng.IntN(5)
				}
				before := p.total.provided
				err := p.step(key, sc)
				if p.none == 0 && err != nil {
					err = nil // the step is lost, and the next one is clean
				}
				p.none = -1
				if err = p.possible(err); err != nil {
					t.Fatalf("step %d: %v", i, err)
				}
				moved += p.total.provided - before
				p.check()
			}
			if _, err := p.s.Stats(); err != nil {
				t.Error(err)
			}
			p.close()
			x, y := &total.total, p.total
			x.again, x.anew, x.held, x.overflow, x.early, x.floor, x.stashed = x.again+y.again, x.anew+y.anew, x.held+y.held, x.overflow+y.overflow, x.early+y.early, x.floor+y.floor, x.stashed+y.stashed
		})
	}
	t.Logf("%d storages came back, %+v", moved, total.total)
	x := total.total
	if !t.Failed() && min(moved, x.again, x.held, x.overflow, x.early, x.anew, x.floor, x.stashed) < 1 && !testing.Short() {
		t.Error("the loops leave something out")
	}
}

// SPEC S6.4: a session that is closed in the middle of a step has nothing afterwards, and
// touches the caller's memory no more.
func TestCloseInAStep(t *testing.T) {
	for seed := range uint64(10) {
		rng := rand.New(rand.NewPCG(seed, 7))
		cfg, rows := sessions(rng)
		p := newPlayer(t, rng, cfg)
		p.ok(p.possible(p.step("a", script{rng: rand.New(rand.NewPCG(seed, 'a')), rows: rows, stop: -1})))
		p.begin("a")
		sc := script{rng: rand.New(rand.NewPCG(seed, 'a')), rows: rows, stop: rng.IntN(12)}
		if err := p.passes(&sc); err != nil && !errors.Is(err, errStop) {
			t.Fatal(err)
		}
		p.ok(p.s.Close())
		for _, r := range p.records {
			for _, b := range append(r.before, r.mem) {
				if b != nil {
					p.heap.give(b)
				}
			}
		}
		p.close()
	}
}

// SPEC S6.4: counts that no room would do for are the caller's mistake, which is said once.
func TestTooManyRows(t *testing.T) {
	for _, live := range []float64{0, 1} {
		p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Live: live})
		p.begin("a")
		r := p.fresh(0, 24*40, 24)
		r.rows = 41
		p.ok(p.save("moe", []*record{r}, false))
		err := errors.Join(p.end(false), p.s.Check(0))
		var rows *stash.TooManyRows
		if !errors.As(err, &rows) || rows.Rows != 41 || rows.Limit != 40 || !errors.As(err, new(Wrong)) {
			t.Error(err)
		}
		p.ok(p.s.Check(0))
		p.close()
	}
}

// SPEC S6.4: a step that lacked room has it when it is run again, whatever was learned from it.
func TestOneRerunIsEnough(t *testing.T) {
	overflows := 0
	for seed := range uint64(150) {
		p := newPlayer(t, rand.New(rand.NewPCG(seed, 1)), Config{Device: "cpu", Live: 0.1})
		step := func(rng *rand.Rand) bool {
			p.begin("a")
			for range 12 {
				if n := len(p.open); n == 0 || rng.IntN(3) > 0 {
					r := p.fresh(0, 64*[]int{10, 40}[rng.IntN(2)], 64)
					r.rows = rng.IntN(len(r.want)/64 + 1)
					p.ok(p.save("moe", []*record{r}, false))
				} else {
					g := p.open[max(0, n-1-rng.IntN(2))]
					p.ok(p.load(g))
					p.ok(p.release(g))
				}
			}
			p.ok(p.end(false))
			return p.check()
		}
		for range 3 {
			program := rand.NewPCG(p.rng.Uint64(), 2)
			again := *program
			if !step(rand.New(program)) {
				if overflows++; !step(rand.New(&again)) {
					t.Errorf("seed %d lacks room twice", seed)
				}
			}
		}
		p.close()
	}
	if overflows < 50 {
		t.Errorf("only %d steps lacked room", overflows)
	}
}

// SPEC S6.4: figures have what is stashed by name, kept in the step that counts, and how
// often there was too little room. The last one is not worth a berth.
func TestRowsInFigures(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu"})
	step := func(live int) Stats {
		p.begin("a")
		for _, name := range []string{"moe", "fc1", "moe", "moe"} {
			r := p.fresh(0, 64*8000, 64)
			r.rows = live
			p.ok(p.save(name, []*record{r}, false))
		}
		for i := 3; i >= 0; i-- {
			g := p.open[i]
			p.ok(p.load(g))
			p.ok(p.release(g))
		}
		p.ok(p.end(false))
		p.check()
		var x Stats
		text, err := p.s.Stats()
		p.ok(err)
		p.ok(json.Unmarshal(text, &x))
		return x
	}
	for i, live := range []int{1, 1, 8000, 8000} { // there is too little room for the third
		want := []RowStats{
			{"fc1", 1, 512_000, map[memory.Choice]int{memory.Stash: 1}},
			{"moe", 3, 1_536_000, map[memory.Choice]int{memory.Keep: 1, memory.Stash: 2}},
		}
		if i == 0 {
			want[0].Units, want[1].Units = map[memory.Choice]int{memory.Keep: 1}, map[memory.Choice]int{memory.Keep: 3}
		}
		x := step(live)
		if !reflect.DeepEqual(want, x.Rows) || x.Overflows != min(i/2, 1) || x.Room > 3*512_256 || i > 1 && x.Room < 3*512_000 {
			t.Errorf("step %d: %+v, %v, too small %d times", i, x.Rows, x.Room, x.Overflows)
		}
	}
	p.close()
}

// SPEC S6.4: a berth is free again when the last group that saved its storage is released,
// and not before: the tensors of many microbatches take the room of those of one.
func TestBerthsAreUsedAgain(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Live: 1})
	fresh := func() *record {
		r := p.fresh(0, 64*100, 64)
		r.rows = 100
		return r
	}
	room := func(tensors int) {
		t.Helper()
		if got, want := p.s.berths.Size(), memory.Bytes(tensors)*64*100; got != want {
			t.Errorf("the berths have %v; want %v for %d tensors", got, want, tensors)
		}
	}
	p.begin("a")
	for range 5 {
		a, b := fresh(), fresh()
		p.ok(p.save("moe", []*record{a, b}, false))
		p.ok(p.save("fc2", []*record{a}, false)) // saves one of them again
		both, one := p.open[0], p.open[1]
		p.ok(p.load(both))
		p.ok(p.release(both))
		if len(p.s.rowsOf) != 1 {
			t.Errorf("%d storages are known; want the one that another group needs", len(p.s.rowsOf))
		}
		p.ok(p.save("moe", []*record{fresh()}, false)) // gets the berth of b, not that of a
		room(2)
		p.ok(p.load(one))
		p.ok(p.release(one))
		last := p.open[0]
		p.ok(p.load(last))
		p.ok(p.release(last))
		if len(p.s.rowsOf) != 0 {
			t.Errorf("%d storages are known after all were released", len(p.s.rowsOf))
		}
	}
	p.ok(p.end(false))
	if u, err := p.s.Usage(); err != nil || u.Rows != 0 {
		t.Errorf("%+v, %v", u, err)
	}
	room(2)
	if !p.check() {
		t.Error("there was too little room")
	}
	p.close()
}

// SPEC S6.4: a group that is released before it was loaded, as the graph of a forward
// pass without a backward one is, has its memory back at once: it is on the device, or
// on the CPU it is offloaded already, with the group that was saved.
func TestReleaseWithoutLoad(t *testing.T) {
	for _, pol := range []map[string]memory.Choice{nil, {"mlp": memory.Offload}} {
		p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Policy: pol})
		for range 3 {
			p.begin("a")
			for range 5 {
				p.ok(p.save("mlp", []*record{p.fresh(0, 3000, 0)}, false))
				p.ok(p.release(p.open[0]))
				if n := len(p.heap.live); n > 0 {
					t.Errorf("policy %v: %d blocks are kept", pol, n)
				}
			}
			p.ok(p.end(false))
		}
		p.close()
	}
}

// SPEC S6.4: on the CPU, what a group saved is offloaded when Save returns: no
// copy is under way that more memory would wait for.
func TestSaveDrains(t *testing.T) {
	// What comes back at once may stay, so links are so fast that nothing but the last group does.
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Policy: map[string]memory.Choice{"mlp": memory.Offload}, Links: memory.Links{Out: 1e15, In: 1e15}})
	for step := range 4 {
		p.begin("a")
		const groups = 5
		for i := range groups {
			p.ok(p.save("mlp", []*record{p.fresh(0, 3000, 0), p.fresh(0, 500, 0)}, false))
			if n := len(p.heap.live); step > 0 && i < groups-1 && n > 0 { // the last is needed at once, and may stay
				t.Errorf("step %d: %d blocks are here behind group %d", step, n, i)
			}
		}
		for i := groups - 1; i >= 0; i-- {
			g := p.open[i]
			p.ok(p.load(g))
			p.ok(p.release(g))
		}
		p.ok(p.end(false))
	}
	p.close()
}

// SPEC S6.4: rows that stayed where they are have their memory back with the last group,
// loaded or not; what is saved under the same number then is another storage.
func TestReleasedRows(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu"})
	for range 3 {
		p.begin("a")
		for i, row := range []int{24, 24, 0, 24} {
			r := p.fresh(1, 24*40, row)
			r.rows = 10 * i
			p.ok(p.save("moe", []*record{r}, false))
			p.ok(p.save("moe", []*record{r}, false))
			for _, g := range slices.Clone(p.open) {
				if i > 0 && row > 0 { // a storage of its own has its rows wherever it was before
					_, err := p.s.Rows(r.id)
					p.ok(err)
				}
				p.ok(p.release(g))
			}
			if n := len(p.heap.live); n > 0 {
				t.Errorf("storage %d: %d blocks are kept", i, n)
			}
		}
		p.ok(p.end(false))
		p.check()
	}
	p.close()
}

// SPEC S6.4: what is too small to leave, or is to stay, does not leave for a berth either.
func TestRowsThatStay(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Live: 1, Least: 24 * 41}) // of so many bytes it is not below
	p.begin("a")
	p.ok(p.save("moe", []*record{p.fresh(0, 24*40, 24), p.fresh(0, 24*41, 24)}, false))
	p.ok(p.save("moe", []*record{p.fresh(0, 24*41, 24)}, true))
	if p.records[1].mem == nil || p.records[2].mem != nil || p.records[3].mem == nil {
		t.Error("a storage below the least size was offloaded, or one that must stay, or the other was not")
	}
	p.ok(p.end(false))
	p.close()
}

// SPEC S6.4: a load lists as held the storages that another group needs as well, and no
// others: the caller may free those at any time.
func TestHeldStorages(t *testing.T) {
	for _, pol := range []map[string]memory.Choice{nil, {"mlp": memory.Offload}} {
		p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Policy: pol})
		for step := range 3 {
			p.begin("a")
			one, two := p.fresh(0, 3000, 0), p.fresh(0, 3000, 0)
			p.ok(p.save("mlp", []*record{one, two}, false))
			p.ok(p.save("mlp", []*record{two}, false))
			for _, x := range []struct {
				group uint64
				held  []uint64
			}{{2, []uint64{two.id}}, {1, nil}} {
				held, returned, err := p.s.Load(x.group)
				p.ok(err)
				p.free(returned)
				if !slices.Equal(held, x.held) {
					t.Errorf("policy %v, step %d: the load of group %d holds %v; want %v", pol, step, x.group, held, x.held)
				}
				returned, err = p.s.Release(x.group)
				p.ok(err)
				p.free(returned)
			}
			p.ok(p.end(false))
		}
		p.close()
	}
}

// SPEC S6.4: nothing is learned from an abandoned step: what it did not come to need is
// worth a berth all the same.
func TestAbandonedStepsTeachNothing(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu", Live: 1})
	for i, abandoned := range []bool{true, false, true, false} {
		p.begin("a")
		for range 3 {
			r := p.fresh(0, 24*40, 24)
			r.rows = 40
			p.ok(p.save("moe", []*record{r}, false))
		}
		stashed := 0
		for _, r := range p.s.order {
			if r.choice == memory.Stash {
				stashed++
			}
		}
		if want := []int{3, 3, 2, 2}[i]; stashed != want { // the last is needed at once, as the second step shows
			t.Errorf("step %d stashed %d storages; want %d", i, stashed, want)
		}
		for _, n := range map[bool][]int{true: {0, 1}, false: {2, 1, 0}}[abandoned] {
			p.ok(p.load(p.open[n]))
		}
		p.ok(p.end(abandoned))
		p.check()
	}
	p.close()
}

// SPEC S6.4: a group that cannot be saved leaves nothing under way that reads the caller's
// counts, and nothing that a check would stumble over.
func TestSaveThatFails(t *testing.T) {
	p := newPlayer(t, rand.New(rand.NewPCG(1, 1)), Config{Device: "cpu"})
	for range 100 {
		p.begin("a")
		r := p.fresh(0, 24*40, 24)
		binary.LittleEndian.PutUint64(r.count, 40)
		_, returned, err := p.s.Save("moe", []Storage{
			{ID: r.id, Address: address(r.mem), Bytes: 24 * 40, Rows: address(r.count), RowBytes: 24},
			{ID: 7, Address: address(r.mem), Bytes: 1 << 60, Rows: address(r.count), RowBytes: 1 << 30},
		})
		binary.LittleEndian.PutUint64(r.count, 41)
		p.free(returned)
		if !errors.As(err, new(*device.OutOfMemory)) {
			t.Fatal(err)
		}
		p.ok(p.end(true))
		if p.check(); t.Failed() {
			break
		}
	}
	p.close()
}
