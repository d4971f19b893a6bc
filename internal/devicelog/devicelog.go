// Package devicelog writes down what a program asks of a device, call by call. Two runs
// that issue the same work on the same memory in the same order have the same log, so a
// table of logs shows a wait, a copy or an allocation too many, which costs no result.
// Only tests import it.
package devicelog

import (
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Log holds the calls since the last Take.
type Log struct {
	// Overlap leaves work of several streams, and looks at events, to the wrapped device, for
	// tests whose clock stands still while there is work.
	Overlap bool
	// Unordered lists kinds of calls with their streams, such as "copy a#1". The order of such
	// calls that follow each other does not count: that of a map, for example.
	Unordered []string

	mu      sync.Mutex
	buffers map[*device.Buffer]string
	number  map[string]int // of streams, events, graphs and buffers so far, by their names
	looks   int            // at events
	syncs   uint64         // that the log made
	lines   []string
}

// Wrap returns a device that does what d does and writes it down. Work is done when it is
// issued, and before anything else, so that nothing depends on time: also not whether an event
// is done, which every third look denies.
func Wrap(d device.Device) (device.Device, *Log) {
	l := &Log{buffers: map[*device.Buffer]string{}, number: map[string]int{}}
	return &dev{d, l}, l
}

// Take returns the calls since the last Take: how many there were of each kind, and a sum of
// all.
func (l *Log) Take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	h, counts := fnv.New32a(), map[string]int{}
	for i, from := 0, 0; i < len(l.lines); i++ {
		of := l.unordered(l.lines[i])
		if of == "" || of != l.unordered(l.lines[from]) {
			from = i
		}
		slices.Sort(l.lines[from : i+1])
	}
	for _, line := range l.lines {
		fmt.Fprintln(h, line)
		what, _, _ := strings.Cut(line, " ")
		counts[what]++
	}
	var words []string
	for what, n := range counts {
		words = append(words, fmt.Sprintf("%s %d", what, n))
	}
	slices.Sort(words)
	l.lines = nil
	return fmt.Sprintf("%s: %08x", strings.Join(words, ", "), h.Sum32())
}

// unordered returns the entry of Unordered that a call belongs to, or nothing.
func (l *Log) unordered(line string) string {
	for _, u := range l.Unordered {
		if strings.HasPrefix(line, u+" ") {
			return u
		}
	}
	return ""
}

// Lines returns the calls since the last Take, a line each.
func (l *Log) Lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.lines)
}

func (l *Log) add(what string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := what
	for _, a := range args {
		switch x := a.(type) {
		case device.Range:
			line += fmt.Sprintf(" %s[%d+%d]", l.buffers[x.Buf], x.Off, x.Len)
		case device.Rect:
			line += fmt.Sprintf(" %s[%d+%d %d/%d]", l.buffers[x.Buf], x.Off, x.Len, x.Rows, x.Pitch)
		case *device.Buffer:
			line += " " + l.buffers[x]
		default:
			line += fmt.Sprint(" ", x)
		}
	}
	l.lines = append(l.lines, line)
}

// name returns a name for something new.
func (l *Log) name(of string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.number[of]++
	return fmt.Sprintf("%s#%d", of, l.number[of])
}

func (l *Log) buffer(b *device.Buffer, owner string) *device.Buffer {
	if b != nil {
		name := l.name(owner)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.buffers[b] = name
	}
	return b
}

type dev struct {
	device.Device
	log *Log
}

func (d *dev) Alloc(kind memory.Kind, size memory.Bytes, owner string) (*device.Buffer, error) {
	d.log.add("alloc", kind, int64(size), owner)
	b, err := d.Device.Alloc(kind, size, owner)
	return d.log.buffer(b, owner), err
}

func (d *dev) Reserve(kind memory.Kind, size memory.Bytes, owner string) (*device.Buffer, error) {
	d.log.add("reserve", kind, int64(size), owner)
	b, err := d.Device.Reserve(kind, size, owner)
	return d.log.buffer(b, owner), err
}

func (d *dev) Grow(b *device.Buffer, size memory.Bytes) error {
	if size > b.Size() { // else it does nothing
		d.log.add("grow", b, int64(size))
	}
	return d.Device.Grow(b, size)
}

func (d *dev) Backdrop(b *device.Buffer) error {
	d.log.add("backdrop", b)
	return d.Device.Backdrop(b)
}

func (d *dev) Borrow(kind memory.Kind, addr uintptr, size memory.Bytes, owner string) *device.Buffer {
	d.log.add("borrow", kind, int64(size), owner)
	return d.log.buffer(d.Device.Borrow(kind, addr, size, owner), owner)
}

func (d *dev) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	if err != nil {
		return nil, err
	}
	x := &stream{Stream: s, log: d.log, as: d.log.name(name)}
	d.log.add("stream", x.as)
	return x, nil
}

func (d *dev) NewEvent(flags device.EventFlags) (device.Event, error) {
	e, err := d.Device.NewEvent(flags)
	if err != nil {
		return nil, err
	}
	x := &event{e, d.log, d.log.name("event")}
	d.log.add("event", x.as, flags)
	return x, nil
}

func (d *dev) Sync() error {
	d.log.add("sync")
	return d.Device.Sync()
}

// Info has the same number of units everywhere, because launches depend on it.
func (d *dev) Info() device.Info {
	i := d.Device.Info()
	i.Units = 4
	return i
}

// Counters leaves out what the log waited for.
func (d *dev) Counters() device.Counters {
	c := d.Device.Counters()
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	c.HostSyncs -= d.log.syncs
	return c
}

type event struct {
	device.Event
	log *Log
	as  string
}

func (e *event) Done() bool {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	e.log.looks++
	return (e.log.Overlap || e.log.looks%3 != 0) && e.Event.Done()
}

func (e *event) Sync() error {
	e.log.add("sync", e.as)
	return e.Event.Sync()
}

func (e *event) Since(earlier device.Event) (time.Duration, error) {
	return e.Event.Since(earlier.(*event).Event)
}

func (e *event) Close() error {
	e.log.add("close", e.as)
	return e.Event.Close()
}

type graph struct {
	device.Graph
	log *Log
	as  string
}

func (g *graph) Close() error {
	g.log.add("close", g.as)
	return g.Graph.Close()
}

type stream struct {
	device.Stream
	log  *Log
	as   string
	work uint64 // pieces so far
}

// Issued counts what was asked for. The wrapped device leaves out waits for what is over.
func (s *stream) Issued() uint64 { return s.work }

// add writes down a piece of work.
func (s *stream) add(what string, args ...any) {
	if !s.Capturing() {
		s.work++
	}
	s.log.add(what, append([]any{s.as}, args...)...)
}

// finish waits for the work that was issued.
func (s *stream) finish() {
	if s.log.Overlap || s.Capturing() {
		return
	}
	_ = s.Stream.Sync() // an error stays, and the next call returns it
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.log.syncs++
}

func (s *stream) Copy(dst, src device.Range) {
	s.add("copy", dst, src)
	s.Stream.Copy(dst, src)
	s.finish()
}

func (s *stream) Copy2D(dst, src device.Rect) {
	s.add("copy2d", dst, src)
	s.Stream.Copy2D(dst, src)
	s.finish()
}

func (s *stream) Fill(dst device.Range, value byte) {
	s.add("fill", dst, value)
	s.Stream.Fill(dst, value)
	s.finish()
}

func (s *stream) Launch(l device.Launch) {
	args := []any{l.Kernel.Name, l.Grid, l.Block, l.Shared, l.Slot}
	for a := range l.Accesses {
		args = append(args, a.Mode, a.Rect)
	}
	s.add("launch", args...)
	s.Stream.Launch(l)
	s.finish()
}

func (s *stream) Host(fn func(), access ...device.Access) {
	var args []any
	for _, a := range access {
		args = append(args, a.Mode, a.Rect)
	}
	s.add("host", args...)
	s.Stream.Host(fn, access...)
	s.finish()
}

func (s *stream) Upload(dst device.Range, src []byte) {
	s.add("upload", dst)
	s.Stream.Upload(dst, src)
	s.finish()
}

func (s *stream) Download(dst []byte, src device.Range) error {
	s.add("download", src)
	return s.Stream.Download(dst, src)
}

func (s *stream) Free(b *device.Buffer) {
	s.log.add("free", s.as, b)
	s.Stream.Free(b)
	s.finish()
}

func (s *stream) Record(e device.Event) {
	x := e.(*event)
	s.add("record", x.as)
	s.Stream.Record(x.Event)
}

func (s *stream) Wait(e device.Event) {
	x := e.(*event)
	s.add("wait", x.as)
	s.Stream.Wait(x.Event)
	s.finish()
}

func (s *stream) BeginCapture() {
	s.log.add("capture", s.as)
	s.Stream.BeginCapture()
}

func (s *stream) EndCapture() (device.Graph, error) {
	g, err := s.Stream.EndCapture()
	if g == nil {
		s.log.add("captured", s.as, "nothing")
		return nil, err
	}
	x := &graph{g, s.log, s.log.name("graph")}
	s.log.add("captured", s.as, x.as, g.Nodes())
	return x, err
}

func (s *stream) Replay(g device.Graph) {
	x := g.(*graph)
	s.add("replay", x.as)
	s.Stream.Replay(x.Graph)
	s.finish()
}

func (s *stream) Sync() error {
	s.log.add("sync", s.as)
	return s.Stream.Sync()
}

func (s *stream) Close() error {
	s.log.add("close", s.as)
	return s.Stream.Close()
}
