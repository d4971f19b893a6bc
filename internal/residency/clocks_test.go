// This file owns an executor that tracks the last user of every byte, and the order of
// users by vector clocks. It reports the first pair of uses that no wait orders, and
// wrong contents.

package residency

import (
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

type clock [Lanes]int

func (c clock) join(d clock) clock {
	for l := range c {
		c[l] = max(c[l], d[l])
	}
	return c
}

func (c clock) covers(d clock) bool { return c.join(d) == c }

// cell is one byte: its contents (a storage's number plus one), the clock of its last
// writer and, for each lane, of its last reader.
type cell struct {
	value  int
	writer clock
	reads  clock
}

// wait is one call of After that the lane's next work depends on.
type wait struct {
	call int
	mark clock
}

type clocks struct {
	device, host []cell
	borrowed     map[int][][]cell // by storage: what was provided and not returned, oldest first
	pool         [][]cell         // that was returned: compute uses it for other things
	all          bool
	provided     map[int]int
	lanes        [Lanes]clock
	pending      [Lanes][]wait
	marks        []clock
	inScope      []bool // of each mark
	markLane     []Lane
	scope        bool
	calls        int   // of After
	needed       []int // those that nothing else implied
	drop         int   // the one that is left out, or -1
	left         map[int]int
	stay         map[int]bool
	least        memory.Bytes
	cap          int
	placing      func(s *Storage) // told of copies out that make room, or nil
	said         []string
	wrong        string
	decided      uint32 // a sum of all decisions
}

// note adds a decision to the sum.
func (x *clocks) note(args ...any) {
	h := fnv.New32a()
	fmt.Fprintln(h, x.decided, args)
	x.decided = h.Sum32()
}

func newClocks(cfg Config) *clocks {
	device := cfg.Device
	if cfg.Borrowed {
		device = 0 // nothing lies there
	}
	return &clocks{
		device: make([]cell, device), host: make([]cell, cfg.Host), borrowed: map[int][][]cell{},
		all: cfg.Borrowed, provided: map[int]int{}, left: map[int]int{}, stay: map[int]bool{}, drop: -1, least: cfg.Least, cap: cfg.Cap,
	}
}

func (x *clocks) fail(format string, args ...any) {
	if x.wrong == "" {
		x.wrong = fmt.Sprintf(format, args...)
	}
}

// flush advances the lane's clock to that of its next work.
func (x *clocks) flush(l Lane) {
	for i, w := range x.pending[l] {
		others := x.lanes[l]
		for j, v := range x.pending[l] {
			if j != i {
				others = others.join(v.mark)
			}
		}
		if !others.covers(w.mark) {
			x.needed = append(x.needed, w.call)
		}
	}
	for _, w := range x.pending[l] {
		x.lanes[l] = x.lanes[l].join(w.mark)
	}
	x.pending[l] = x.pending[l][:0]
}

func (x *clocks) Record(l Lane) Mark {
	x.note("record", l)
	if x.scope && l == Out {
		x.fail("a mark of %v inside a scope", l)
	}
	x.flush(l)
	x.marks, x.inScope, x.markLane = append(x.marks, x.lanes[l]), append(x.inScope, x.scope), append(x.markLane, l)
	return Mark(len(x.marks))
}

func (x *clocks) After(l Lane, m Mark) {
	x.note("after", l, m)
	if m < 1 || int(m) > len(x.marks) {
		x.fail("%v after mark %d of %d", l, m, len(x.marks))
		return
	}
	if x.scope && x.inScope[m-1] && x.markLane[m-1] == Compute && l != Compute {
		x.fail("%v is issued before the graph and after work in it", l)
	}
	x.said = append(x.said, fmt.Sprintf("%v at %v and %v after %v at %v", l, x.lanes[l], x.pending[l], x.markLane[m-1], x.marks[m-1]))
	if x.calls++; x.calls-1 != x.drop {
		x.pending[l] = append(x.pending[l], wait{x.calls - 1, x.marks[m-1]})
	}
}

// work begins a piece of work of a lane.
func (x *clocks) work(l Lane) {
	x.flush(l)
	x.lanes[l][l]++
	if x.cap > 0 && l == Compute && x.lanes[Out][Out]-x.lanes[l][Out] > x.cap {
		x.fail("compute runs with more than %d copies out under way", x.cap)
	}
	if l == Compute {
		for _, cells := range x.pool {
			x.write(Compute, cells, 0)
		}
	}
}

func (x *clocks) write(l Lane, cells []cell, value int) {
	for i := range cells {
		c := &cells[i]
		if !x.lanes[l].covers(c.writer) || !x.lanes[l].covers(c.reads) {
			x.fail("%v overwrites %d with %d, and nothing makes it wait for those who use it", l, c.value, value)
		}
		*c = cell{value: value, writer: clock{}}
		c.writer[l] = x.lanes[l][l]
	}
}

func (x *clocks) read(l Lane, cells []cell, value int) {
	for i := range cells {
		c := &cells[i]
		if c.value != value || !x.lanes[l].covers(c.writer) {
			x.fail("%v reads %d where %d should be, or before it is written", l, c.value, value)
		}
		c.reads[l] = x.lanes[l][l]
	}
}

// onDevice returns the bytes at which compute sees a storage.
func (x *clocks) onDevice(s *Storage) []cell {
	if q := x.borrowed[s.ID]; len(q) > 0 && (x.all || s.Device == None) {
		return q[len(q)-1]
	}
	return x.device[s.Device : s.Device+s.Bytes]
}

func (x *clocks) there(s *Storage) []cell { return x.host[s.Host : s.Host+s.Bytes] }

func (x *clocks) Out(s *Storage) {
	x.note("out", s.ID, s.Device, s.Host)
	if x.scope || x.stay[s.ID] || s.Bytes < x.least {
		x.fail("%v is copied out in a scope, or though it is to stay", s)
	}
	if x.placing != nil {
		x.placing(s)
	}
	x.work(Out)
	x.read(Out, x.onDevice(s), s.ID+1)
	x.write(Out, x.there(s), s.ID+1)
}

func (x *clocks) In(s *Storage) {
	x.note("in", s.ID, s.Device, s.Host)
	x.work(In)
	x.read(In, x.there(s), s.ID+1)
	x.write(In, x.onDevice(s), s.ID+1)
}

// ProvideMemory finds memory for a storage that is reloaded: memory that was returned, if
// there is any, or other memory. Compute's work so far uses either.
func (x *clocks) ProvideMemory(s *Storage) {
	x.note("provide", s.ID)
	if len(x.borrowed[s.ID]) > 0 && x.provided[s.ID] == 0 {
		x.fail("memory is provided for %v, whose own is still there", s)
	}
	x.provided[s.ID]++
	i := slices.IndexFunc(x.pool, func(c []cell) bool { return memory.Bytes(len(c)) == s.Bytes })
	if i < 0 {
		x.pool, i = append(x.pool, make([]cell, s.Bytes)), len(x.pool)
	}
	x.work(Compute)
	x.borrowed[s.ID] = append(x.borrowed[s.ID], x.pool[i])
	x.pool = slices.Delete(x.pool, i, i+1)
}

// ReturnMemory lets the owner write something else to the oldest memory that is provided.
func (x *clocks) ReturnMemory(s *Storage) {
	x.note("return", s.ID)
	if x.left[s.ID]++; x.left[s.ID] > 1+x.provided[s.ID] || !s.Borrowed {
		x.fail("%v is let go more often than provided, or is not borrowed", s)
		return
	}
	oldest := x.borrowed[s.ID][0]
	x.borrowed[s.ID] = x.borrowed[s.ID][1:]
	x.work(Compute)
	x.write(Compute, oldest, 0)
	if x.all {
		x.pool = append(x.pool, oldest)
	}
}

// make is compute's first work on a storage, and see is a part of later work.
func (x *clocks) make(s *Storage) {
	if s.Borrowed {
		x.borrowed[s.ID] = [][]cell{make([]cell, s.Bytes)}
	}
	x.work(Compute)
	x.write(Compute, x.onDevice(s), s.ID+1)
}

func (x *clocks) see(s *Storage) {
	x.read(Compute, x.onDevice(s), s.ID+1)
}

// end is the work of the next step on all bytes.
func (x *clocks) end() {
	x.work(Compute)
	x.write(Compute, x.device, 0)
	x.write(Compute, x.host, 0)
	x.needed = slices.Compact(slices.Sorted(slices.Values(x.needed)))
}
