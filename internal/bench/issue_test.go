// This file tests the cost of issuing with a stream on which each piece takes a known time.

package bench

import (
	"errors"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// pieceTime is how long a piece takes, which is issued at once or waits for the end.
const pieceTime = 10 * time.Microsecond

// slowStream takes pieceTime for each launch and for each node of a graph.
type slowStream struct {
	device.Stream
	capturing bool
	nodes     int
}

type slowGraph struct {
	device.Graph
	nodes int
}

func (g *slowGraph) Close() error { return nil }

func (s *slowStream) Launch(device.Launch) {
	if s.nodes++; !s.capturing {
		time.Sleep(pieceTime)
	}
}

func (s *slowStream) BeginCapture() { s.capturing, s.nodes = true, 0 }

func (s *slowStream) EndCapture() (device.Graph, error) {
	s.capturing = false
	return &slowGraph{nodes: s.nodes}, nil
}

func (s *slowStream) Replay(g device.Graph) {
	time.Sleep(time.Duration(g.(*slowGraph).nodes) * pieceTime)
}

func (s *slowStream) Sync() error { return nil }

// The cost of issuing is that of one launch, of one replay, and of one node of a graph, in microseconds.
func TestOverheadsAreOfOnePiece(t *testing.T) {
	r, err := newRig(open(t, memory.MiB), 4*memory.KiB)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		runtime.LockOSThread() // so that every batch counts
		defer runtime.UnlockOSThread()
		x := *r
		x.out = &slowStream{}
		var names []string
		err := x.overheads(func(o Overhead) error {
			if names = append(names, o.What); o.Elapsed != 10 || o.CPU < 0 || o.CPU >= 1000 {
				t.Errorf("%+v, want 10 µs", o)
			}
			return nil
		})
		if err != nil || len(names) != 3 {
			t.Errorf("%q, %v", names, err)
		}
	})
	if err := r.close(); err != nil {
		t.Error(err)
	}
}

// Rates are decimal: a gigabyte in a second, whatever takes no time.
func TestRates(t *testing.T) {
	for _, c := range []struct {
		n    memory.Bytes
		t    time.Duration
		want float64
	}{{1e9, time.Second, 1}, {1e9, time.Millisecond, 1000}, {500, 0, 500}} {
		if got := gbps(c.n, c.t); got != c.want {
			t.Errorf("%d bytes in %v are %v GB/s, want %v", c.n, c.t, got, c.want)
		}
	}
}

// A way is compared again with the fastest of the others, which is named, and progress tells of the time of a line.
func TestTheFastestIsTheRival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		takes := func(name string, d time.Duration) way {
			return way{name, 1, func(n int) error { time.Sleep(time.Duration(n) * d); return nil }}
		}
		mine := takes("mine", 4*time.Millisecond)
		others := []way{takes("slow", 9*time.Millisecond), takes("fast", 3*time.Millisecond), takes("slower", 12*time.Millisecond)}
		var last, all int
		o := Options{Line: time.Second, Progress: func(done, of int) { last, all = done, of }}
		times, err := o.compare(append([]way{mine}, others...))
		if err != nil {
			t.Fatal(err)
		}
		best, two, err := o.compareFastest(mine, others, times[1:])
		if best != "fast" || two[0] != 4*time.Millisecond || two[1] != 3*time.Millisecond || err != nil {
			t.Errorf("%s, %v, %v", best, two, err)
		}
		if all != 1000 || last < 1000 || last > 1500 {
			t.Errorf("the line is at %d of %d ms", last, all)
		}
	})
}

// The figure of a way is the first quartile, which few disturbances reach.
func TestQuartile(t *testing.T) {
	for want, ts := range map[time.Duration][]time.Duration{2: {9, 1, 8, 2, 7, 6, 9}, 5: {5}, 3: {4, 3}, 4: {9, 4, 3, 8, 5, 6, 7, 2}} {
		if got := quartile(ts); got != want {
			t.Errorf("of %v it is %v, want %v", ts, got, want)
		}
	}
}

// Sizes rise, from what fits in caches to what does not, and are those of a kind of device.
func TestSizesRise(t *testing.T) {
	for backend, most := range map[string]memory.Bytes{"cpu": 256 * memory.MiB, "cuda": memory.GiB} {
		s := Sizes(backend)
		if !slices.IsSorted(s) || len(s) < 3 || s[0] != memory.MiB || s[len(s)-1] != most {
			t.Errorf("%s: %v", backend, s)
		}
	}
}

// A line has the rate of the bytes that its direction counts, and stands beside the plain copy of as many.
func TestLinesCountBytes(t *testing.T) {
	for d, twice := range map[Direction]float64{Out: 1, In: 1, Both: 2, Device: 2, Host: 2} {
		got := lineOf(d, "stream", 3e6, 2*time.Millisecond).beside("best", time.Millisecond)
		want := Copy{Direction: d, Via: "stream", Size: 3e6, GBps: 1.5 * twice, Plain: "best", PlainGBps: 3 * twice, Ratio: 0.5}
		if got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	if got := teraflops(1000, time.Millisecond); got != 2 {
		t.Errorf("a product of matrices of 1000 in a millisecond has %v TFLOP/s, want 2", got)
	}
}

// failsLast is a device whose streams end with an error.
type failsLast struct{ device.Device }

type lastStream struct{ device.Stream }

var errLast = errors.New("the end fails")

func (f failsLast) NewStream(name string) (device.Stream, error) {
	s, err := f.Device.NewStream(name)
	return lastStream{s}, err
}

func (s lastStream) Close() error { return errors.Join(s.Stream.Close(), errLast) }

// Whatever is measured, an error of the end is returned.
func TestErrorsOfTheEnd(t *testing.T) {
	d := failsLast{open(t, memory.MiB)}
	for name, err := range map[string]error{
		"copies":    Copies(d, Options{Line: time.Microsecond}, 100, []Direction{Out}, func(Copy) error { return nil }),
		"overheads": Overheads(d, func(Overhead) error { return nil }),
		"product":   func() error { _, err := Product(d, kernels.F32, 16); return err }(),
	} {
		if !errors.Is(err, errLast) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
