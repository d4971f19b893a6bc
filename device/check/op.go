// This file owns operations: how one is made, checked, and handed to the inner
// device, to the scheduler, or to a capture.

package check

import "github.com/stowage-dev/stowage/device"

// opFree is the name of a free in reports.
const opFree = "free"

// wholeOf returns a buffer at its present size as one row.
func wholeOf(b *device.Buffer) device.Rect {
	return device.Rect{Range: b.All(), Pitch: b.Size(), Rows: 1}
}

// op is one operation as the program issued it.
type op struct {
	dev    *dev
	name   string
	number int
	stream string
	site   *Site
	graph  *capture // that holds it
	uses   []use
	run    func(device.Stream) // executes it on a stream of the inner device
	launch *device.Launch      // of a kernel, as the inner device gets it
	frees  *buffer
	fails  *device.DriverError
	late   bool
}

// declare adds a use to an operation.
func (o *op) declare(r device.Rect, mode device.Mode) {
	o.uses = append(o.uses, use{newSpan(r), mode, o.dev.c.recordOf(r.Buf), r})
}

// issue applies the fault that exists for an operation, and then captures or submits it.
func (s *stream) issue(o *op, class Class, dst device.Range) {
	c := s.dev.c
	o.site, o.stream = c.sites.callSite(), s.name
	if class < classes {
		if f := c.count(class); f.Do != 0 {
			o.applyFault(f, dst)
		}
	}
	if s.capture != nil {
		if o.launch != nil {
			s.capture.label(o.launch.Slot)
		}
		s.capture.addOp(o)
		if s.inner != nil && o.fails == nil && c.found == nil {
			o.run(s.inner)
		}
		return
	}
	l := s.lanes[0]
	s.issued++
	l.number++
	o.number = l.number
	c.submit(l, &act{op: o})
}

// submit checks a piece of work and hands it over for execution. Without a schedule the
// inner stream gets it at once, except for frees after a report: a free may be part of the
// race, so it waits until nothing runs.
func (c *Checker) submit(l *lane, a *act) {
	if !c.checkUses(l, a) && a.op.frees == nil {
		return
	}
	if c.scheduled() {
		l.queue.push(c.sched.enqueue(l, a))
		c.runDue()
		return
	}
	if a.op.frees != nil && c.found != nil {
		l.stream.limbo = append(l.stream.limbo, a.op)
		return
	}
	c.execute(a.op, l.stream.inner)
}

// execute does an operation on the inner device. After a failure it only frees memory.
func (c *Checker) execute(o *op, on device.Stream) {
	if o.frees != nil {
		o.run(on)
		return
	}
	switch {
	case o.dev.err() != nil:
	case o.fails != nil:
		o.dev.failed = o.fails
	default:
		o.run(on)
	}
}

// launch returns the operation of a launch. The inner device gets a launch that declares
// its own handles, because the program's may be dead when a schedule executes it.
func (d *dev) launch(l device.Launch) *op {
	if l.Kernel == nil {
		panic("check: a launch without a kernel")
	}
	c := d.c
	for a := range l.Accesses {
		c.usable("kernel "+l.Kernel.Name, a.Buf)
	}
	l.Check()
	n := device.NewLaunch(l.Kernel, 1, 1)
	n.Grid, n.Block, n.Shared, n.Slot = l.Grid, l.Block, l.Shared, l.Slot
	for _, v := range l.Args() {
		n.Arg(v)
	}
	o := &op{dev: d, name: "kernel " + l.Kernel.Name}
	var more []device.Access
	for a := range l.Accesses {
		o.declare(a.Rect, a.Mode)
		a.Rect = c.insideRect(a.Rect)
		if len(o.uses) <= 4 { // few are held inline, the rest in one slice
			n.Declare(a)
		} else {
			more = append(more, a)
		}
	}
	n.DeclareAll(more)
	o.launch, o.run = &n, func(in device.Stream) { in.Launch(n) }
	return o
}

// prepare makes the inner device load a kernel when it is first issued, as it would without
// a schedule. An error of the kernel then shows in this call, and loading waits for nothing
// that a schedule executes earlier.
func (d *dev) prepare(o *op) {
	k := o.launch.Kernel
	if d.loaded[k] {
		return
	}
	d.serial.BeginCapture()
	defer func() {
		if g, err := d.serial.EndCapture(); err == nil {
			_ = g.Close()
		}
	}()
	d.serial.Launch(*o.launch)
	d.loaded[k] = true
}
