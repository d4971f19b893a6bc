// This file owns the checked device and its memory.

package check

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// dev is a checked device. Its counters are its own: under a schedule the inner
// device sees other calls than the program made.
type dev struct {
	c        *Checker
	inner    device.Device
	serial   device.Stream // under a schedule, where all work is executed
	handOver device.Event  // of the serial stream, to another device's
	loaded   map[*device.Kernel]bool
	failed   error // by a rule
	streams  []*stream
	live     map[*buffer]struct{}
	held     [memory.Kinds]memory.Bytes // freed, but the free is held back
	counters device.Counters
	open     map[any]*Site // streams, events and graphs that are not closed, with where they were made
	closed   bool
}

// buffer is the checker's record of a buffer. The program has a handle of its
// own, because a free that is held back must not reach the inner device, while
// the handle dies at once.
type buffer struct {
	dev          *dev
	outer, inner *device.Buffer
	shadow       *shadow
	borrowed     bool
	backed       bool // has a backdrop
	alloc        *Site
	freed        *act
	gone         bool // the scheduler has executed the free
}

func (d *dev) Info() device.Info {
	i := d.inner.Info()
	for k, n := range d.c.o.Limits {
		if n > 0 {
			i.Capacity[k] = min(i.Capacity[k], n)
		}
	}
	return i
}

func (d *dev) Freeze() { d.inner.Freeze() }

func (d *dev) Counters() device.Counters {
	d.c.mu.Lock()
	defer d.c.mu.Unlock()
	return d.counters
}

// Memory returns the inner device's reading; memory whose free is held back is
// pending.
func (d *dev) Memory() device.Usage {
	c := d.c
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flushNow()
	u := d.inner.Memory()
	for k := range u.Kind {
		u.Kind[k].Pending += d.held[k]
		if n := c.o.Limits[k]; n > 0 {
			u.Kind[k].Capacity = min(u.Kind[k].Capacity, n)
		}
	}
	return u
}

// err returns what sticks: the checker's report, or a failure by rule.
func (d *dev) err() error {
	if d.c.found != nil {
		return d.c.found
	}
	return d.failed
}

// firstError returns the error to return when the inner device returned err.
func (d *dev) firstError(err error) error {
	if e := d.err(); e != nil {
		return e
	}
	return err
}

func (d *dev) Alloc(kind memory.Kind, size memory.Bytes, owner string) (*device.Buffer, error) {
	return d.obtain(Allocs, kind, size, owner, func() (*device.Buffer, error) { return d.inner.Alloc(kind, size, owner) })
}

func (d *dev) Reserve(kind memory.Kind, limit memory.Bytes, owner string) (*device.Buffer, error) {
	return d.obtain(Allocs, kind, 0, owner, func() (*device.Buffer, error) { return d.inner.Reserve(kind, limit, owner) })
}

// obtain allocates through the rules and limits.
func (d *dev) obtain(class Class, kind memory.Kind, size memory.Bytes, owner string, alloc func() (*device.Buffer, error)) (*device.Buffer, error) {
	c := d.c
	c.mu.Lock()
	defer c.unlock()
	if err := d.err(); err != nil {
		return nil, err
	}
	c.flushNow()
	if c.count(class).Do == Fail || d.exceedsLimit(kind, size) {
		return nil, d.outOfMemory(kind, size, owner)
	}
	inner, err := alloc()
	if err != nil {
		return nil, err
	}
	d.soil(inner, 0)
	b := d.wrap(inner)
	lo := int64(inner.Addr())
	b.shadow = newShadow(lo, lo+int64(inner.Max()))
	d.live[b] = struct{}{}
	return b.outer, nil
}

// soil fills new memory of the CPU device from an offset on with bytes that mean nothing, as
// that of a GPU has. Of much memory it fills the beginning.
func (d *dev) soil(inner *device.Buffer, from memory.Bytes) {
	if n := min(inner.Size()-from, memory.MiB); d.inner.Info().Backend == "cpu" && n > 0 {
		new := device.Slice[byte](uint64(inner.Addr())+uint64(from), int(n))
		for i := range new {
			new[i] = 0xa5
		}
	}
}

func (d *dev) wrap(inner *device.Buffer) *buffer {
	b := &buffer{
		dev: d, inner: inner, alloc: d.c.sites.callSite(),
		outer: device.NewBuffer(inner.Kind(), inner.Addr(), inner.Size(), inner.Max(), inner.Owner()),
	}
	b.outer.Mem = b
	return b
}

// exceedsLimit reports whether more memory would break a limit.
func (d *dev) exceedsLimit(kind memory.Kind, more memory.Bytes) bool {
	limit := d.c.o.Limits[kind]
	return limit > 0 && d.inner.Memory().Kind[kind].Current+more > limit
}

func (d *dev) outOfMemory(kind memory.Kind, asked memory.Bytes, owner string) error {
	u := d.inner.Memory()
	limit := u.Kind[kind].Capacity
	if n := d.c.o.Limits[kind]; n > 0 {
		limit = min(limit, n)
	}
	e := &device.OutOfMemory{
		Device: d.inner.Info().Name, Kind: kind, Owner: owner, Asked: asked,
		Free: max(0, limit-u.Kind[kind].Current), Capacity: limit, Pending: u.Kind[kind].Pending + d.held[kind],
	}
	for _, o := range u.Owners {
		if o.Kind == kind && o.Current > 0 {
			e.Owners = append(e.Owners, o)
		}
	}
	slices.SortFunc(e.Owners, func(a, b device.OwnerUsage) int {
		return cmp.Or(cmp.Compare(b.Current, a.Current), cmp.Compare(a.Owner, b.Owner))
	})
	return e
}

func (d *dev) Grow(outer *device.Buffer, size memory.Bytes) error {
	c := d.c
	c.usable("grow", outer)
	c.mu.Lock()
	defer c.unlock()
	if err := d.err(); err != nil {
		return err
	}
	b := c.recordOf(outer)
	more := size - b.inner.Size()
	if more > 0 {
		c.flushNow()
		if c.count(Grows).Do == Fail || d.exceedsLimit(outer.Kind(), more) {
			return d.outOfMemory(outer.Kind(), more, outer.Owner())
		}
	}
	if more > 0 && b.backed { // what is mapped to the maximum changes: nothing may use it meanwhile
		whole := device.Rect{Range: device.Range{Buf: outer, Len: outer.Max()}, Pitch: outer.Max(), Rows: 1}
		c.hostAccess("grow", use{newSpan(whole), device.Write, b, whole}, c.sites.callSite())
		if err := d.err(); err != nil {
			return err
		}
	}
	had := b.inner.Size()
	if err := d.inner.Grow(b.inner, size); err != nil {
		return err
	}
	if !b.backed {
		d.soil(b.inner, had)
	}
	outer.SetSize(b.inner.Size())
	return nil
}

// Backdrop counts as a growth: it may need memory of the device's own.
func (d *dev) Backdrop(outer *device.Buffer) error {
	c := d.c
	c.usable("backdrop", outer)
	c.mu.Lock()
	defer c.unlock()
	if err := d.err(); err != nil {
		return err
	}
	b := c.recordOf(outer)
	c.flushNow()
	if c.count(Grows).Do == Fail {
		return d.outOfMemory(outer.Kind(), 0, outer.Owner())
	}
	err := d.inner.Backdrop(b.inner)
	b.backed = b.backed || err == nil
	return err
}

// Borrow returns a handle to memory that the caller owns. All such handles share one
// shadow by address, because views of one storage overlap. Memory inside of a buffer of
// a checked device has the shadow of that buffer.
func (d *dev) Borrow(kind memory.Kind, addr uintptr, size memory.Bytes, owner string) *device.Buffer {
	c := d.c
	c.mu.Lock()
	defer c.unlock()
	b := d.wrap(d.inner.Borrow(kind, addr, size, owner))
	b.borrowed, b.shadow = true, c.borrowedShadow
	lo, hi := int64(addr), int64(addr)+int64(size)
	for _, other := range c.devs {
		for o := range other.live {
			if from := o.shadow.segs[0].lo; !o.borrowed && from <= lo && hi <= o.shadow.end {
				b.shadow = o.shadow
			}
		}
	}
	c.borrowed = append(c.borrowed, b)
	return b.outer
}

// forget ends a borrowed handle. Its memory is no longer checked unless another handle
// shares it.
func (c *Checker) forget(b *buffer) {
	c.borrowed = slices.DeleteFunc(c.borrowed, func(o *buffer) bool { return o == b })
	if b.shadow == c.borrowedShadow && !c.shared(b) {
		lo := int64(b.outer.Addr())
		c.borrowedShadow.forget(lo, lo+int64(b.outer.Size()))
	}
}

// shared reports whether another live handle has bytes of a borrowed buffer.
func (c *Checker) shared(b *buffer) bool {
	if b.shadow != c.borrowedShadow {
		return true
	}
	lo, hi := b.outer.Addr(), b.outer.Addr()+uintptr(b.outer.Size())
	return slices.ContainsFunc(c.borrowed, func(o *buffer) bool {
		return o != b && o.outer.Addr() < hi && lo < o.outer.Addr()+uintptr(o.outer.Size())
	})
}

func (d *dev) View(r device.Range, mode device.Mode) []byte {
	c := d.c
	c.usable("view", r.Buf)
	whole := device.Rect{Range: r, Pitch: r.Len, Rows: 1}
	device.CheckAccess(device.Access{Rect: whole, Mode: mode})
	c.mu.Lock()
	defer c.unlock()
	if b := c.recordOf(r.Buf); r.Len > 0 {
		c.hostAccess("view", use{newSpan(whole), mode, b, whole}, c.sites.callSite())
	}
	c.flushNow() // what was executed must be seen, what is held back must not
	return d.inner.View(c.inside(r), mode)
}

// recordOf returns the record behind a handle.
func (c *Checker) recordOf(b *device.Buffer) *buffer {
	m, ok := b.Mem.(*buffer)
	if !ok || m.dev.c != c {
		panic(fmt.Sprintf("check: %s was not made by a device of this checker; wrap its device with the same one", b))
	}
	return m
}

// inside returns a range as the inner device knows it.
func (c *Checker) inside(r device.Range) device.Range {
	return device.Range{Buf: c.recordOf(r.Buf).inner, Off: r.Off, Len: r.Len}
}

func (c *Checker) insideRect(r device.Rect) device.Rect {
	r.Range = c.inside(r.Range)
	return r
}

// refuse ends a call that holds the lock with a report. The call did nothing, so
// the report does not stick.
func (c *Checker) refuse(report error) {
	c.mu.Unlock()
	if c.o.Report != nil {
		c.o.Report(report)
	}
	panic(report)
}

// usable panics with a report if a handle is dead. It comes before the checks
// of the contract, which cannot say where the buffer was freed.
func (c *Checker) usable(name string, bufs ...*device.Buffer) {
	for _, outer := range bufs {
		if outer == nil || outer.Live() {
			continue
		}
		b := c.recordOf(outer)
		c.mu.Lock()
		o := Operation{Name: name, Bytes: wholeOf(outer), Site: *c.sites.callSite()}
		err := &UseAfterFree{Use: o, Free: b.freed.describe(nil), Alloc: *b.alloc}
		c.refuse(err)
	}
}

// Sync waits for all streams.
func (d *dev) Sync() error {
	c := d.c
	c.mu.Lock()
	d.counters.HostSyncs++
	known := clock(nil)
	for _, s := range d.streams {
		s.letGo()
		known.join(s.lanes[0].clock)
	}
	if c.scheduled() {
		defer c.unlock()
		c.runAll(d)
		err := c.flushed(d)
		c.learn(known)
		return d.firstError(err)
	}
	c.mu.Unlock()
	err := d.inner.Sync()
	c.mu.Lock()
	defer c.unlock()
	c.learn(known)
	return d.firstError(err)
}

// Close waits for all work and closes the inner device. Memory that was never
// freed is reported with the place of an allocation.
func (d *dev) Close() error {
	c := d.c
	c.mu.Lock()
	defer c.unlock()
	if d.closed {
		panic("check: device closed twice")
	}
	d.closed = true
	if c.scheduled() {
		c.runAll(d)
	}
	for _, s := range slices.Clone(d.streams) {
		s.letGo()
		c.learn(s.lanes[0].clock)
		s.retireLanes()
	}
	c.mu.Unlock()
	err := d.inner.Close()
	c.mu.Lock()
	var largest *buffer
	for b := range d.live {
		if largest == nil || b.outer.Size() > largest.outer.Size() {
			largest = b
		}
	}
	if err != nil && largest != nil {
		err = fmt.Errorf("%w; %s was allocated at %s", err, largest.outer, largest.alloc)
	}
	return errors.Join(d.err(), err)
}
