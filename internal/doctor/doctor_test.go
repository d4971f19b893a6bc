// This file tests the report with simulated machines, and its text against golden files.

package doctor

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
)

func TestMain(m *testing.M) { leak.Main(m) }

// probe returns a machine without a GPU and without libraries.
func probe() Probe {
	open := func() (device.Device, error) { return cpu.Open(cpu.Options{}) }
	return Probe{
		Version: "stowage test",
		Machine: func() sysinfo.Machine {
			return sysinfo.Machine{
				CPU:    sysinfo.CPU{Model: "Test CPU", Arch: "amd64", Threads: 8, Features: []sysinfo.Feature{{Name: "avx2", Has: true}, {Name: "avx512f"}}},
				Memory: sysinfo.Memory{Total: 64 * memory.GiB, Available: 32 * memory.GiB},
			}
		},
		Place:   func() (*launcher.Place, error) { return nil, nil },
		OpenCPU: open,
		GPUs: func() ([]cuda.GPU, error) {
			return nil, &device.Unsupported{What: "CUDA device", Why: "libcuda.so.1 was not found", Need: "install the driver"}
		},
		OpenGPU:   func(int) (device.Device, error) { return open() },
		Libraries: func() []Library { return known() },
		Bench:     bench.Options{Line: time.Microsecond},
	}
}

// compare compares the text of a report with a golden file. It sets measured speeds to
// one figure first.
func compare(t *testing.T, name string, r *Report) {
	t.Helper()
	for i := range r.Devices {
		if l := r.Devices[i].Link; l != nil {
			if l.Out <= 0 || l.In <= 0 || l.Both <= 0 || l.Local <= 0 || l.Size != linkSize {
				t.Errorf("implausible speeds %+v", *l)
			}
			*l = Link{Size: l.Size, Out: 10, In: 20.04, Both: 30.06, Local: 4000}
		}
		if p := r.Devices[i].Products; p != nil {
			if p.BF16 <= 0 || p.F32 <= 0 {
				t.Errorf("implausible products %+v", *p)
			}
			p.BF16, p.F32 = 800.4, 0.25
		}
	}
	var got bytes.Buffer
	r.Text(&got)
	golden.Check(t, name, got.String())
}

// SPEC S6.3
func TestNoGPU(t *testing.T) {
	r := Examine(probe())
	compare(t, "no-gpu.txt", r)
	for _, m := range r.Missing {
		if m.What == "" || m.Why == "" || m.Do == "" {
			t.Errorf("incomplete advice %+v", m)
		}
	}
}

func TestGPUs(t *testing.T) {
	p := probe()
	p.Machine = func() sysinfo.Machine {
		m := probe().Machine()
		m.CPU.Quota = 2.5
		m.Memory.Limit, m.Memory.Headroom, m.Memory.Cgroup = 16*memory.GiB, 4*memory.GiB, "v2"
		return m
	}
	p.GPUs = func() ([]cuda.GPU, error) {
		return []cuda.GPU{
			{Ordinal: 0, Name: "Test GPU", Capability: "9.0", Driver: "13.0", Total: 140 * memory.GiB, Free: 139 * memory.GiB, Link: "32.0 GT/s PCIe x16"},
			{Ordinal: 1, Name: "Full GPU", Capability: "8.0", Driver: "13.0", Total: 80 * memory.GiB, Free: memory.MiB},
			{Ordinal: 2, Name: "Held GPU", Capability: "8.0", Driver: "13.0", Total: 80 * memory.GiB, Trouble: "its free memory is not known: busy"},
			{Ordinal: 3, Name: "Old GPU", Capability: "7.0", Driver: "13.0", Total: 32 * memory.GiB, Free: 31 * memory.GiB, Problem: "it is too old"},
		}, nil
	}
	p.OpenGPU = func(i int) (device.Device, error) {
		if i >= 2 {
			t.Error("a GPU that cannot be used was opened")
		}
		if i == 1 {
			return nil, &device.OutOfMemory{Device: "cuda:1", Owner: "context", Capacity: 80 * memory.GiB}
		}
		return cpu.Open(cpu.Options{})
	}
	p.Libraries = func() []Library {
		ls := known()
		ls[0].Path, ls[0].Version = "/usr/lib/libcublasLt.so.13", "13.1.0"
		ls[2].Trouble = "libevent.so.7: cannot open shared object file: No such file or directory"
		return ls
	}
	var told []int
	p.Progress = func(done, all int) { told = append(told, all-done) }
	compare(t, "gpus.txt", Examine(p))
	gpus, _ := p.GPUs()
	if len(told) != 1+len(gpus) || told[0] != len(gpus) || told[len(told)-1] != 0 {
		t.Errorf("of %d GPUs and the CPU were left, device by device: %v", len(gpus), told)
	}
}

// A device that fails in the middle is reported, and the rest is still examined.
func TestFailingDevices(t *testing.T) {
	p := probe()
	p.OpenCPU = func() (device.Device, error) {
		var small [memory.Kinds]memory.Bytes
		small[memory.Device], small[memory.Host] = memory.MiB, memory.MiB
		return cpu.Open(cpu.Options{Capacity: small})
	}
	p.GPUs = func() ([]cuda.GPU, error) { return nil, errors.New("the driver is on fire") }
	r := Examine(p)
	compare(t, "failing.txt", r)
}

// Every device that was opened is closed once, whether its copies are measured or not.
func TestDevicesAreClosed(t *testing.T) {
	p := probe()
	var open, closed int
	watch := func(capacity memory.Bytes) (device.Device, error) {
		var room [memory.Kinds]memory.Bytes
		room[memory.Device], room[memory.Host] = capacity, capacity
		d, err := cpu.Open(cpu.Options{Capacity: room})
		open++
		return &watched{d, &closed}, err
	}
	p.OpenCPU = func() (device.Device, error) { return watch(memory.MiB) }
	p.GPUs = func() ([]cuda.GPU, error) { return []cuda.GPU{{Ordinal: 0}, {Ordinal: 1}}, nil }
	p.OpenGPU = func(i int) (device.Device, error) { return watch([]memory.Bytes{memory.GiB, memory.MiB}[i]) }
	r := Examine(p)
	if open != 3 || closed != 3 || r.Devices[0].Link != nil || r.Devices[1].Link == nil || r.Devices[2].Link != nil {
		t.Errorf("%d devices were opened and %d closed: %+v", open, closed, r.Devices)
	}
}

type watched struct {
	device.Device
	closed *int
}

func (w *watched) Close() error {
	*w.closed++
	return w.Device.Close()
}

func TestTightLimit(t *testing.T) {
	p := probe()
	p.Machine = func() sysinfo.Machine {
		m := probe().Machine()
		m.Memory.Limit, m.Memory.Headroom, m.Memory.Cgroup = 128*memory.MiB, 100*memory.MiB, "v1"
		return m
	}
	p.OpenCPU = func() (device.Device, error) { panic("nothing may be allocated") }
	compare(t, "tight.txt", Examine(p))
}

// The loader finds the C library on every system that can run this program, and finds no
// library with an invented name.
func TestFindLibrary(t *testing.T) {
	l := Library{Name: "C", names: []string{"libstowage-test-nobody-has-this.so", "libc.so.6"}, version: func(h uintptr) string {
		if _, ok := call(h, "no_such_function"); ok {
			t.Error("a function was found that is not there")
		}
		if n, ok := call(h, "abs", ^uintptr(4)+0); !ok || int32(n) != 5 {
			t.Errorf("abs(-5) gave %d, %v", int32(n), ok)
		}
		return "6"
	}}
	l.find()
	if !strings.HasPrefix(l.Path, "/") || !strings.Contains(l.Path, "libc") || l.Version != "6" {
		t.Errorf("found %+v", l)
	}
	none := Library{names: []string{"libstowage-test-nobody-has-this.so"}}
	if none.find(); none.Path != "" || none.Trouble != "" {
		t.Errorf("found %+v", none)
	}
	// The file exists and is no library.
	text := filepath.Join(t.TempDir(), "libtext.so")
	if err := os.WriteFile(text, []byte("no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	broken := Library{names: []string{text}}
	if broken.find(); broken.Path != "" || broken.Trouble == "" {
		t.Errorf("found %+v", broken)
	}
}

func TestMappedFrom(t *testing.T) {
	maps := "7f00-7f01 r--p 00000000 08:01 42    /usr/lib/libmpifort.so.40\n" +
		"7f01-7f02 rw-p 00000000 00:00 0 \n" +
		"7f02-7f03 r--p 00000000 08:01 43    /usr/lib/x86 64/libmpi.so.40.30.4\n"
	if got := mappedFrom(strings.NewReader(maps), "libmpi.so.40"); got != "/usr/lib/x86 64/libmpi.so.40.30.4" {
		t.Errorf("%q", got)
	}
	both := "7f02-7f03 r--p 00000000 08:01 43    /opt/libmpi.so.12.1.8\n" + maps
	if got := mappedFrom(strings.NewReader(both), "libmpi.so.40"); got != "/usr/lib/x86 64/libmpi.so.40.30.4" {
		t.Errorf("%q", got)
	}
	if got := mappedFrom(strings.NewReader(maps), "libmpi.so.12"); got != "/usr/lib/x86 64/libmpi.so.40.30.4" {
		t.Errorf("%q", got)
	}
	if got := mappedFrom(strings.NewReader(maps), "libnccl.so.2"); got != "libnccl.so.2" {
		t.Errorf("%q", got)
	}
}

func TestVersions(t *testing.T) {
	for in, want := range map[string]string{
		"Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4\x00":   "Open MPI v4.1.4",
		"MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7 12:34:45 CDT 2022\n\x00": "MPICH 4.0.2",
		"": "",
	} {
		if got := mpiName(in); got != want {
			t.Errorf("%q gives %q, want %q", in, got, want)
		}
	}
	for in, want := range map[int]string{130100: "13.1.0", 120304: "12.3.4", 22105: "2.21.5"} {
		if got := dotted(in); got != want {
			t.Errorf("%d gives %q, want %q", in, got, want)
		}
	}
}
