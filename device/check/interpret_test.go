// This file owns the running of test programs on a device and beside it on the
// model.

package check_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

var mixKernel = &device.Kernel{Name: "mix", Go: func(l *device.Launch) {
	a := l.Args()
	dst, src := device.Slice[byte](a[0], int(a[2])), device.Slice[byte](a[1], int(a[2]))
	for i := range dst {
		dst[i] = 31*dst[i] + src[i] + byte(a[3])
	}
}}

var columnsKernel = &device.Kernel{Name: "columns", Go: func(l *device.Launch) {
	a := l.Args()
	for r := range a[3] {
		for i, v := range device.Slice[byte](a[0]+r*a[2], int(a[1])) {
			device.Slice[byte](a[0]+r*a[2], int(a[1]))[i] = 5*v + byte(a[4])
		}
	}
}}

var addKernel = &device.Kernel{Name: "add", Go: func(l *device.Launch) {
	a := l.Args()
	words := device.Slice[uint64](a[0], int(a[1]/8))
	for i := range words {
		atomic.AddUint64(&words[i], a[2])
	}
}}

func openCPU() (device.Device, error) { return cpu.Open(cpu.Options{CopyThreads: 1}) }

// machine runs one program.
type machine struct {
	dev     device.Device
	bufs    [buffers]*device.Buffer
	streams [streams]device.Stream
	events  [events]device.Event
	graph   device.Graph
	model   contents
	capture *captured // what the graph does to the model
	cap     *oracle   // follows captures, to tell what is captured
}

func newMachine(d device.Device) (*machine, error) {
	m := &machine{dev: d, model: newMemory(), cap: newOracle()}
	for i := range m.streams {
		s, err := d.NewStream(fmt.Sprint("s", i))
		if err != nil {
			return nil, err
		}
		m.streams[i] = s
	}
	for i := range m.bufs {
		k := memory.Device
		if i >= firstHost {
			k = memory.Host
		}
		b, err := d.Alloc(k, bufBytes, fmt.Sprint("b", i))
		if err != nil {
			return nil, err
		}
		m.bufs[i] = b
		m.streams[0].Upload(b.All(), m.model[i][:])
	}
	for i := range m.events {
		var flags device.EventFlags
		if i >= plain {
			flags = device.External
		}
		e, err := d.NewEvent(flags)
		if err != nil {
			return nil, err
		}
		m.events[i] = e
	}
	return m, m.streams[0].Sync()
}

// rangeOf and rectOf are a rect on the device.
func (m *machine) rangeOf(r rect) device.Range {
	return m.bufs[r.buf].Slice(memory.Bytes(r.off), memory.Bytes(r.n))
}

func (m *machine) rectOf(r rect) device.Rect {
	return device.Rect{Range: m.rangeOf(r), Pitch: memory.Bytes(r.pitch), Rows: r.rows}
}

func (m *machine) launch(c call) device.Launch {
	switch c.kind {
	case doColumns:
		l := device.NewLaunch(columnsKernel, 1, 1)
		l.Arg(uint64(m.rangeOf(c.dst).Addr()))
		l.Arg(uint64(c.dst.n))
		l.Arg(uint64(c.dst.pitch))
		l.Arg(uint64(c.dst.rows))
		l.Arg(uint64(c.value))
		l.Declare(device.Access{Rect: m.rectOf(c.dst), Mode: device.Write})
		return l
	case doAdd:
		l := device.NewLaunch(addKernel, 1, 1)
		l.Atomic(m.rangeOf(c.dst))
		l.Arg(uint64(c.dst.n))
		l.Arg(uint64(c.value))
		return l
	}
	l := device.NewLaunch(mixKernel, 1, 1)
	l.Slot = c.slot
	l.Write(m.rangeOf(c.dst))
	l.Read(m.rangeOf(c.src))
	l.Arg(uint64(c.dst.n))
	l.Arg(uint64(c.value))
	return l
}

// run runs a program and compares what it can see on the way, and all contents in
// the end.
func (m *machine) run(p program) error {
	for i, c := range p {
		m.cap.step(i, c)
		if err := m.do(c); err != nil {
			return fmt.Errorf("call %d, %v: %w", i, c, err)
		}
	}
	if err := m.dev.Sync(); err != nil {
		return err
	}
	got := make([]byte, bufBytes)
	for i, b := range m.bufs {
		if err := m.streams[i%streams].Download(got, b.All()); err != nil {
			return err
		}
		if err := differ(got, m.model[i][:]); err != nil {
			return fmt.Errorf("buffer %d in the end: %w", i, err)
		}
	}
	return nil
}

func differ(got, want []byte) error {
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("byte %d is %d, want %d", i, got[i], want[i])
		}
	}
	return nil
}

// captures reports whether the call was taken up by a capture.
func (m *machine) captures(c call) bool {
	return m.cap.capture != nil && m.cap.capture.joined[c.stream]
}

// do makes one call, and does it to the model.
func (m *machine) do(c call) error {
	s := m.streams[c.stream]
	if c.work() && c.kind != doView {
		if !m.captures(c) {
			defer m.model.apply(c)
		}
		return m.issue(s, c)
	}
	switch c.kind {
	case doView:
		b := m.dev.View(m.rangeOf(c.dst), c.uses()[0].mode)
		err := differ(b, m.model[c.dst.buf][c.dst.off:][:c.dst.n])
		m.model.apply(c)
		if c.value%2 == 1 && err == nil {
			for i := range b {
				b[i] += c.value
			}
		}
		return err
	case doRecord:
		s.Record(m.events[c.event])
	case doWait:
		s.Wait(m.events[c.event])
	case doSyncStream:
		return s.Sync()
	case doSyncEvent:
		return m.events[c.event].Sync()
	case doSyncDevice:
		return m.dev.Sync()
	case doPoll:
		for !m.events[c.event].Done() {
			runtime.Gosched()
		}
	case doBegin:
		s.BeginCapture()
	case doEnd:
		g, err := s.EndCapture()
		m.graph, m.capture = g, m.cap.graph
		return err
	case doReplay:
		if m.graph == nil {
			return nil
		}
		s.Replay(m.graph)
		for _, k := range m.capture.calls {
			m.model.apply(k)
		}
	case doUpdate:
		labelled := func(k call) bool { return k.slot == 1 }
		if m.graph == nil || !slices.ContainsFunc(m.capture.calls, labelled) {
			return nil // a removed edge kept the launch out of the graph
		}
		m.capture = m.cap.graph
		return m.graph.Update(1, m.launch(c))
	}
	return nil
}

// issue makes a call that is work of a stream.
func (m *machine) issue(s device.Stream, c call) error {
	switch c.kind {
	case doCopy:
		s.Copy(m.rangeOf(c.dst), m.rangeOf(c.src))
	case doCopy2D:
		s.Copy2D(m.rectOf(c.dst), m.rectOf(c.src))
	case doFill:
		s.Fill(m.rangeOf(c.dst), c.value)
	case doHost:
		b := device.Slice[byte](uint64(m.rangeOf(c.dst).Addr()), c.dst.n)
		s.Host(func() {
			for i := range b {
				b[i] ^= c.value
			}
		}, device.Writes(m.rangeOf(c.dst)))
	case doUpload:
		b := make([]byte, c.dst.n)
		for i := range b {
			b[i] = c.value
		}
		s.Upload(m.rangeOf(c.dst), b)
		clear(b)
	case doDownload:
		got := make([]byte, c.src.n)
		if err := s.Download(got, m.rangeOf(c.src)); err != nil {
			return err
		}
		return differ(got, m.model[c.src.buf][c.src.off:][:c.src.n])
	default:
		s.Launch(m.launch(c))
	}
	return nil
}

// end gives everything back.
func (m *machine) end() error {
	if m.graph != nil {
		if err := m.graph.Close(); err != nil {
			return err
		}
	}
	for _, b := range m.bufs {
		m.streams[0].Free(b)
	}
	var err error
	for _, e := range m.events {
		err = errors.Join(err, e.Close())
	}
	for _, s := range m.streams {
		err = errors.Join(err, s.Close())
	}
	return err
}

// on runs a program on a device.
func on(p program) func(device.Device) error {
	return func(d device.Device) error {
		m, err := newMachine(d)
		if err != nil {
			return err
		}
		if err := m.run(p); err != nil {
			return err
		}
		return m.end()
	}
}
