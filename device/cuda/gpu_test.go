//go:build linux

// This file tests what only a GPU shows, beside the conformance suite. Without
// one the tests skip and say why.

package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/devicetest"
	"github.com/stowage-dev/stowage/memory"
)

// open skips the test where there is no GPU.
func open(t testing.TB, o Options) *Device {
	t.Helper()
	d, err := Open(o)
	var no *device.Unsupported
	if errors.As(err, &no) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func closeDevice(t testing.TB, d *Device) {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

func newStream(t testing.TB, d *Device, name string) device.Stream {
	t.Helper()
	s, err := d.NewStream(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func alloc(t testing.TB, d *Device, k memory.Kind, n memory.Bytes) *device.Buffer {
	t.Helper()
	b, err := d.Alloc(k, n, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func synced(t testing.TB, s interface{ Sync() error }) {
	t.Helper()
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
}

// words downloads a range as numbers.
func words(t testing.TB, s device.Stream, r device.Range) []uint64 {
	t.Helper()
	b := make([]byte, r.Len)
	if err := s.Download(b, r); err != nil {
		t.Fatal(err)
	}
	w := make([]uint64, len(b)/8)
	for i := range w {
		w[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return w
}

// The suite runs twice: with copies in graphs left to the driver, and with a
// kernel doing them. One device stays open meanwhile, so that the context is
// made once. SPEC S6.3
func TestConformance(t *testing.T) {
	keep := open(t, Options{})
	defer closeDevice(t, keep)
	for name, o := range map[string]Options{"plain": {}, "copy kernel": {CopyKernel: copyLaunch}} {
		t.Run(name, func(t *testing.T) {
			devicetest.Run(t, func(t *testing.T) device.Device { return open(t, o) },
				devicetest.LaunchesAllocateNothing(),
				devicetest.Limited(func(t *testing.T, c [memory.Kinds]memory.Bytes) device.Device {
					o := o
					o.DeviceCapacity, o.HostCapacity = c[memory.Device], c[memory.Host]
					return open(t, o)
				}))
		})
	}
}

// A GPU that is full is an operating condition: typed, with the true figure,
// and over as soon as memory is free again.
func TestGPUFull(t *testing.T) {
	d := open(t, Options{DeviceCapacity: 1 << 42})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	small := alloc(t, d, memory.Device, 1000)
	pool, err := d.Reserve(memory.Device, 1<<41, "pool")
	if err != nil {
		t.Fatal(err)
	}
	var oom *device.OutOfMemory
	if _, err := d.Alloc(memory.Device, 1<<41, "greedy"); !errors.As(err, &oom) || oom.Owner != "greedy" || oom.Free <= 0 || oom.Free > 1<<38 {
		t.Errorf("Alloc of 2 TiB: %v", err)
	}
	if err := d.Grow(pool, 1<<41); !errors.As(err, &oom) || oom.Owner != "pool" {
		t.Errorf("Grow to 2 TiB: %v", err)
	}
	if err := d.Grow(pool, 3*memory.MiB+1); err != nil {
		t.Fatal(err)
	}
	s.Launch(addLaunch(pool.Slice(2*memory.MiB-64, 128), 1))
	if u := d.Memory().Kind[memory.Device]; u.Current != 3*memory.MiB+1+1000 {
		t.Errorf("in use: %+v", u)
	}
	s.Free(small)
	s.Free(pool)
	synced(t, s)
}

// What cannot be loaded fails with a sentence, and that error sticks.
func TestKernelsThatDoNotLoad(t *testing.T) {
	keep := open(t, Options{})
	defer closeDevice(t, keep)
	for k, want := range map[*device.Kernel][]string{
		absentKernel: {"cuModuleGetFunction", "kernel absent of cuda tests"},
		brokenKernel: {"cuModuleLoadDataEx", "broken.cu", "nonsense"},
		futureKernel: {"no variant of future.cu runs on a GPU of capability"},
	} {
		d := open(t, Options{})
		s := newStream(t, d, "s")
		s.Launch(device.NewLaunch(k, 1, 1))
		err := s.Sync()
		var de *device.DriverError
		if !errors.As(err, &de) {
			t.Fatalf("%s: %v", k.Name, err)
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: the error does not say %q: %v", k.Name, w, err)
			}
		}
		t.Log(err)
		if _, again := d.Alloc(memory.Device, 1, "late"); !errors.Is(again, err) {
			t.Errorf("%s: Alloc after the error: %v", k.Name, again)
		}
		if again := d.Close(); !errors.Is(again, err) {
			t.Errorf("%s: Close after the error: %v", k.Name, again)
		}
	}
}

// A fault on the GPU ends the context for the whole process, so another
// process has it.
func TestFaultSticks(t *testing.T) {
	const variable = "STOWAGE_TEST_FAULT"
	if os.Getenv(variable) != "" {
		faultSticks(t)
		return
	}
	d := open(t, Options{})
	closeDevice(t, d)
	cmd := exec.Command(os.Args[0], "-test.run=^TestFaultSticks$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"=1")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

func faultSticks(t *testing.T) {
	d := open(t, Options{})
	a, b := newStream(t, d, "a"), newStream(t, d, "b")
	h := alloc(t, d, memory.Host, 64)
	l := device.NewLaunch(wildKernel, 1, 1)
	l.Arg(0x10)
	a.Launch(l)
	err := a.Sync()
	var de *device.DriverError
	if !errors.As(err, &de) || de.Code != int(errIllegalAddress) || !strings.Contains(err.Error(), "CUDA_ERROR_ILLEGAL_ADDRESS") {
		t.Fatalf("Sync after a wild write: %v", err)
	}
	ran := false
	b.Host(func() { ran = true })
	b.Fill(h.All(), 7)
	b.Launch(device.NewLaunch(emptyKernel, 1, 1))
	if again := b.Sync(); !errors.Is(again, err) {
		t.Errorf("another stream's Sync: %v", again)
	}
	if _, again := d.NewStream("late"); !errors.Is(again, err) {
		t.Errorf("NewStream: %v", again)
	}
	if ran {
		t.Error("a callback issued after the fault ran")
	}
	b.Free(h)
	if u := d.Memory().Kind[memory.Host]; u.Current != 0 {
		t.Errorf("freed after the fault: %+v", u)
	}
	if again := d.Close(); !errors.Is(again, err) || strings.Contains(again.Error(), "never freed") {
		t.Errorf("Close: %v", again)
	}
}

// A kernel gets the shared memory that its launch asks for, within the 48 KiB that need no permission
// unless the source declares some of them, and beyond.
func TestSharedMemory(t *testing.T) {
	d := open(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	b := alloc(t, d, memory.Device, 8*1024)
	for _, threads := range []int{640, 1024} {
		l := device.NewLaunch(sharedKernel, 1, threads)
		l.Shared = uint32(64 * threads)
		l.Write(b.All())
		s.Launch(l)
		for i, w := range words(t, s, b.All())[:threads] {
			if w != uint64(i^1) {
				t.Fatalf("%d threads: word %d is %d", threads, i, w)
			}
		}
	}
	s.Free(b)
}

// Callbacks arrive on threads that Go did not make, in plain streams and at
// every replay, while the collector runs and stacks grow.
func TestCallbacksOnForeignThreads(t *testing.T) {
	d := open(t, Options{})
	defer closeDevice(t, d)
	s, other := newStream(t, d, "s"), newStream(t, d, "other")
	threads := sync.Map{}
	var plain, replayed atomic.Int64
	count := func(n *atomic.Int64) func() {
		return func() {
			threads.Store(syscall.Gettid(), true)
			if deep(200) != 200 {
				panic("the stack is broken")
			}
			n.Add(1)
		}
	}
	s.BeginCapture()
	s.Launch(device.NewLaunch(emptyKernel, 1, 1))
	s.Host(count(&replayed))
	s.Host(count(&replayed))
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	for range 500 {
		s.Replay(g)
		other.Host(count(&plain))
	}
	if err := g.Close(); err != nil { // while replays are in flight
		t.Fatal(err)
	}
	synced(t, s)
	synced(t, other)
	close(stop)
	wg.Wait()
	if plain.Load() != 500 || replayed.Load() != 1000 {
		t.Errorf("%d of 500 plain and %d of 1000 replayed callbacks ran", plain.Load(), replayed.Load())
	}
	n := 0
	threads.Range(func(any, any) bool { n++; return true })
	t.Logf("callbacks ran on %d threads", n)
	d.Memory()
	if len(d.calls) != 0 {
		t.Errorf("%d callbacks are still held", len(d.calls))
	}
}

func deep(n int) int {
	var pad [256]byte
	if n == 0 {
		return int(pad[0])
	}
	return 1 + deep(n-1)
}

// A panic in a callback is the device's error, as on the CPU device.
func TestCallbackPanics(t *testing.T) {
	d := open(t, Options{})
	s := newStream(t, d, "s")
	s.Host(func() { panic("no such page") })
	err := s.Sync()
	if err == nil || !strings.Contains(err.Error(), "host callback failed: no such page") {
		t.Errorf("Sync after a panic in a callback: %v", err)
	}
	if again := d.Close(); !errors.Is(again, err) {
		t.Errorf("Close: %v", again)
	}
}

// Another library's context and stream can be used, and its threads keep the
// context they had.
func TestForeignContextAndStream(t *testing.T) {
	owner := open(t, Options{})
	defer closeDevice(t, owner)
	theirs := newStream(t, owner, "theirs").(*stream)
	d, err := OpenContext(owner.Context(), Options{HostCapacity: memory.MiB, DeviceCapacity: memory.MiB})
	if err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	owner.drv.call(&owner.drv.ctxSetCurrent, 0)
	s := d.BorrowStream(theirs.Handle(), "borrowed")
	b := alloc(t, d, memory.Device, 1024)
	s.Fill(b.All(), 0)
	for range 10 {
		s.Launch(addLaunch(b.All(), 3))
	}
	if w := words(t, s, b.All()); w[127] != 30 {
		t.Errorf("ten times three is %d", w[127])
	}
	var gpu int32
	if r := d.drv.callPtr(&d.drv.ctxGetDevice, uintptr(pointer(&gpu))); r == success {
		t.Error("the thread had no context, and now it has one")
	}
	s.Free(b)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	theirs.Launch(device.NewLaunch(emptyKernel, 1, 1))
	synced(t, theirs)
}

// A thread that has another context current, another GPU's for instance, can
// issue work all the same.
func TestAnotherContextIsCurrent(t *testing.T) {
	d := open(t, Options{})
	defer closeDevice(t, d)
	lib, err := purego.Dlopen(libraries[0], purego.RTLD_NOW)
	if err != nil {
		t.Skip(err)
	}
	addr, err := purego.Dlsym(lib, "cuCtxCreate_v2")
	if err != nil {
		t.Skip(err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var other uint64
	if r := d.drv.callPtr(&proc{"cuCtxCreate_v2", addr}, uintptr(pointer(&other)), 0, uintptr(d.gpu)); r != success {
		t.Skip(d.drv.text(r))
	}
	s, s2 := newStream(t, d, "s"), newStream(t, d, "s2")
	b := alloc(t, d, memory.Device, 1024)
	e, _ := d.NewEvent(0)
	s.Fill(b.All(), 0)
	s.BeginCapture()
	s.Launch(addLaunch(b.All(), 100))
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	for _, work := range []func(){
		func() { s.Launch(addLaunch(b.All(), 1)) },
		func() { s.Replay(g) },
		func() { s.Record(e) },
		func() { s2.Wait(e) },
		func() { s2.Launch(addLaunch(b.All(), 10)) },
		func() { e.Done() },
	} {
		d.drv.call(&d.drv.ctxSetCurrent, uintptr(other))
		work()
	}
	if w := words(t, s2, b.All()); w[0] != 111 || w[127] != 111 {
		t.Errorf("1, 100 and 10 make %d and %d", w[0], w[127])
	}
	s2.Free(b)
}

// Sixteen goroutines share streams and devices; nothing is lost.
func TestManyGoroutines(t *testing.T) {
	d0, d1 := open(t, Options{}), open(t, Options{})
	defer closeDevice(t, d0)
	defer closeDevice(t, d1)
	for _, d := range []*Device{d0, d1} {
		s := newStream(t, d, "shared")
		b := alloc(t, d, memory.Device, 4096)
		s.Fill(b.All(), 0)
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for i := range 200 {
					s.Launch(addLaunch(b.All(), 1))
					if i%50 == 0 {
						if err := s.Sync(); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
		wg.Wait()
		if w := words(t, s, b.All()); w[0] != 3200 || w[511] != 3200 {
			t.Errorf("3200 launches added %d and %d", w[0], w[511])
		}
		s.Free(b)
	}
}

// More than the staging memory is uploaded at once, behind work that lasts.
func TestUploadBeyondStaging(t *testing.T) {
	d := open(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	const n = 3*stagingSize + 12345
	b := alloc(t, d, memory.Device, n)
	src := make([]byte, n)
	for i := range src {
		src[i] = byte(i ^ i>>8 ^ i>>16)
	}
	want := bytes.Clone(src)
	s.Upload(b.All(), src)
	clear(src)
	got := make([]byte, n)
	if err := s.Download(got, b.All()); err != nil || !bytes.Equal(got, want) {
		t.Errorf("uploaded and downloaded %d bytes: equal %v, %v", n, bytes.Equal(got, want), err)
	}
	s.Free(b)
}

func TestListAndCount(t *testing.T) {
	closeDevice(t, open(t, Options{}))
	n, err := Count()
	if err != nil || n < 1 {
		t.Fatalf("Count: %d, %v", n, err)
	}
	gpus, err := List()
	if err != nil || len(gpus) != n {
		t.Fatalf("List: %v, %v", gpus, err)
	}
	for _, g := range gpus {
		t.Logf("%+v", g)
		if g.Name == "" || g.Total <= 0 || g.Free <= 0 || g.Free > g.Total || g.Trouble != "" || !strings.Contains(g.Capability, ".") {
			t.Errorf("a GPU is described as %+v", g)
		}
	}
	_, err = Open(Options{Ordinal: n})
	var no *device.Unsupported
	if !errors.As(err, &no) {
		t.Errorf("Open of a GPU that is not there: %v", err)
	}
}
