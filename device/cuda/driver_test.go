//go:build linux

// This file tests how the driver is found and started, and the choices made
// from what it says. None of it needs a GPU.

package cuda

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// notHere checks that an error says what is missing and what would help.
func notHere(t *testing.T, err error, words ...string) {
	t.Helper()
	var no *device.Unsupported
	if !errors.As(err, &no) || no.What == "" || no.Why == "" || no.Need == "" {
		t.Fatalf("got %v; want a complete *device.Unsupported", err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

func TestNoLibrary(t *testing.T) {
	_, err := openDriver([]string{"libthatisnowhere.so.1", "/nowhere/libcuda.so.1"})
	notHere(t, err, "could not be loaded", "libthatisnowhere.so.1", "install the NVIDIA driver")
}

// The C library stands for a driver that lacks functions.
func TestLibraryTooOld(t *testing.T) {
	_, err := openDriver([]string{"libc.so.6"})
	if err != nil && strings.Contains(err.Error(), "could not be loaded") {
		t.Skip(err)
	}
	notHere(t, err, "too old", "it has no cuCtxGetDevice", "535")
}

func TestStart(t *testing.T) {
	for name, c := range map[string]struct {
		call   string
		result result
		words  []string
	}{
		"no GPU":     {"cuInit", errNoDevice, []string{"found no GPU", "CUDA_VISIBLE_DEVICES"}},
		"stub":       {"cuInit", errStubLibrary, []string{"stub"}},
		"mismatch":   {"cuInit", errDriverMismatch, []string{"does not match the kernel module"}},
		"broken":     {"cuInit", 999, []string{"does not start", "CUDA_ERROR_MADE_UP: a test asked for it", "nvidia-smi"}},
		"no version": {"cuDriverGetVersion", 999, []string{"version"}},
	} {
		t.Run(name, func(t *testing.T) {
			v, f := newFake(t, memory.GiB)
			f.fail[c.call] = c.result
			notHere(t, v.start(), c.words...)
		})
	}
	v, f := newFake(t, memory.GiB)
	f.version = 12010
	notHere(t, v.start(), "too old", "CUDA 12.1")
	f.version = 12020
	if err := v.start(); err != nil || versionString(v.version) != "12.2" {
		t.Errorf("a driver of version %s starts with %v", versionString(v.version), err)
	}
}

func TestOpenRefuses(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	for _, ordinal := range []int{-1, 1} {
		_, err := v.open(Options{Ordinal: ordinal})
		notHere(t, err, "the driver finds 1 GPU")
	}
	for _, o := range []Options{{DeviceCapacity: -1}, {HostCapacity: -1}} {
		if _, err := v.open(o); err == nil || !strings.Contains(err.Error(), "positive") {
			t.Errorf("Open(%+v): %v", o, err)
		}
	}
	f.fail["cuDevicePrimaryCtxRetain"] = 46
	_, err := v.open(Options{})
	notHere(t, err, "GPU 0 cannot make a context")
	f.fail["cuDevicePrimaryCtxRetain"] = errOutOfMemory
	_, err = v.open(Options{})
	var oom *device.OutOfMemory
	if !errors.As(err, &oom) || oom.Capacity != memory.GiB {
		t.Errorf("Open on a full GPU: %v", err)
	}
	delete(f.fail, "cuDevicePrimaryCtxRetain")
	for call, words := range map[string]string{"cuMemGetAllocationGranularity": "does not map host memory", "cuMemSetAccess": "does not map host memory"} {
		f.fail[call] = 801
		_, err = v.open(Options{})
		notHere(t, err, words)
		delete(f.fail, call)
	}
	f.fail["cuMemCreate"] = errOutOfMemory
	if _, err = v.open(Options{}); !errors.As(err, &oom) || oom.Kind != memory.Host {
		t.Errorf("Open without host memory: %v", err)
	}
	delete(f.fail, "cuMemCreate")
	f.fail["cuMemAddressReserve"] = 717
	var de *device.DriverError
	if _, err = v.open(Options{}); !errors.As(err, &de) || de.Call != "cuMemAddressReserve" {
		t.Errorf("Open without addresses: %v", err)
	}
	delete(f.fail, "cuMemAddressReserve")
	if len(f.maps) != 0 {
		t.Errorf("%d ranges of addresses are left", len(f.maps))
	}
	f.attrs[attrVirtualMemory] = 0
	_, err = v.open(Options{})
	notHere(t, err, "CUDA device 0", "virtual memory management")
	f.attrs[attrVirtualMemory] = 1
	f.attrs[attrMajor], f.attrs[attrMinor] = 7, 5
	_, err = v.open(Options{})
	notHere(t, err, "CUDA device 0", "compute capability 7.5", "8.0 or later")
	if n := f.calls["cuDevicePrimaryCtxRelease_v2"]; n != 8 {
		t.Errorf("eight openings failed with a context in hand, %d gave it back", n)
	}
}

func TestDescribe(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	g := v.describe(0, 0)
	want := GPU{Name: "Made-up GPU", Capability: "9.0", Driver: "0.0", Total: memory.GiB, Free: memory.GiB, PCI: "0000:00:00.0"}
	if g != want || v.count() != 1 {
		t.Errorf("described as %+v, want %+v", g, want)
	}
	f.fail["cuDevicePrimaryCtxRetain"] = errOutOfMemory
	if g := v.describe(0, 0); !strings.Contains(g.Trouble, "free memory is not known") {
		t.Errorf("a GPU without a context is described as %+v", g)
	}
	f.attrs[attrMajor], f.attrs[attrMinor] = 7, 5
	if g := v.describe(0, 0); !strings.Contains(g.Problem, "compute capability 7.5") {
		t.Errorf("a GPU that is too old is described as %+v", g)
	}
}

// Listing never fails where there is nothing to list; it says so.
func TestListWhereThereIsNothing(t *testing.T) {
	n, err := Count()
	gpus, err2 := List()
	if (err == nil) != (err2 == nil) || len(gpus) != n {
		t.Errorf("Count gives %d, %v and List %v, %v", n, err, gpus, err2)
	}
	if err != nil {
		notHere(t, err)
	}
}

func TestPCILink(t *testing.T) {
	const at = "0000:17:00.0/"
	for _, x := range [][2]string{{"Unknown", "16"}, {"32.0 GT/s PCIe", "0"}, {"32.0 GT/s PCIe", " "}, {"", "16"}} {
		if got := pciLink(fstest.MapFS{at + "current_link_speed": {Data: []byte(x[0])}, at + "current_link_width": {Data: []byte(x[1])}}, "0000:17:00.0"); got != "" {
			t.Errorf("%q is the link %q", x, got)
		}
	}
	if got := pciLink(fstest.MapFS{at + "current_link_speed": {Data: []byte("32.0 GT/s PCIe")}}, "0000:17:00.0"); got != "" {
		t.Errorf("a speed alone is the link %q", got)
	}
	for want, files := range map[string]fstest.MapFS{
		"32.0 GT/s PCIe x16": {at + "current_link_speed": {Data: []byte("32.0 GT/s PCIe\n")}, at + "current_link_width": {Data: []byte("16\n")}},
		"":                   {at + "current_link_speed": {Data: []byte("Unknown\n")}, at + "current_link_width": {Data: []byte("0\n")}},
	} {
		if got := pciLink(files, "0000:17:00.0"); got != want {
			t.Errorf("the link is %q, want %q", got, want)
		}
	}
	if got := pciLink(fstest.MapFS{}, "0000:17:00.0"); got != "" {
		t.Errorf("a system that says nothing has the link %q", got)
	}
}

func TestHostBound(t *testing.T) {
	const gib = memory.GiB
	for usable, want := range map[memory.Bytes]memory.Bytes{
		160 * gib: 150 * gib, // a sixteenth stays
		8 * gib:   7 * gib,   // a gigabyte at least
		2 * gib:   gib * 3 / 2,
		0:         1 << 40, // unknown
	} {
		if got := hostBound(usable); got != want {
			t.Errorf("of %v, %v may be pinned; want %v", usable, got, want)
		}
	}
}

// A module holds one kernel, and all that kernels share.
func TestOnly(t *testing.T) {
	const head, one, between, two, line = ".version 7.0\n.extern .shared .b8 pool[];\n",
		".visible .entry one(\n\t.param .u64 p\n)\n.maxntid 128, 1, 1\n{\n\t{\n\tret;\n\t}\n}\n",
		".shared .b8 few[4];\n", ".visible .entry two()\n{\n\tret;\n}\n", ".visible .entry line() { ret; }\n"
	const all = head + one + between + two + line
	for name, want := range map[string]string{
		"one": head + one + between + line, "two": head + between + two + line,
		"line": head + between + line, "tw": head + between + line,
	} {
		if got := only(all, name); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
	}
}

// The kernels of this module have the form that only knows.
func TestOnlyOfOurs(t *testing.T) {
	files := 0
	err := filepath.WalkDir("../../internal/kernels", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".ptx" {
			return err
		}
		files++
		text, err := os.ReadFile(path)
		entries := strings.Split(string(text), ".visible .entry ")[1:]
		for _, e := range entries {
			name, _, _ := strings.Cut(e, "(")
			got := only(string(text), name)
			if strings.Count(got, ".entry") != 1 || !strings.Contains(got, ".entry "+name+"(") || strings.Count(got, "\n}") != 1 {
				t.Errorf("%s: %s is not alone:\n%.2000s", path, name, got)
			}
		}
		return err
	})
	if err != nil || files == 0 {
		t.Errorf("%d files: %v", files, err)
	}
}

func TestChoose(t *testing.T) {
	v := func(major, minor int, exact bool) device.Variant {
		return device.Variant{Major: major, Minor: minor, Exact: exact}
	}
	sm75, sm80, sm90, sm90a, sm100a := v(7, 5, false), v(8, 0, false), v(9, 0, false), v(9, 0, true), v(10, 0, true)
	for _, c := range []struct {
		major, minor int
		have         []device.Variant
		want         device.Variant
		ok           bool
	}{
		{9, 0, []device.Variant{sm80, sm90a}, sm90a, true},
		{9, 0, []device.Variant{sm90a, sm90, sm80}, sm90a, true},
		{9, 0, []device.Variant{sm80, sm90}, sm90, true},
		{8, 0, []device.Variant{sm80}, sm80, true},
		{9, 0, []device.Variant{sm80, sm90, sm75}, sm90, true},
		{9, 0, []device.Variant{sm100a, sm75, sm80}, sm80, true},
		{8, 9, []device.Variant{sm80, sm90a, sm75}, sm80, true},
		{10, 0, []device.Variant{sm80, sm90a, sm90}, sm90, true},
		{12, 1, []device.Variant{sm90a, sm80}, sm80, true},
		{10, 3, []device.Variant{sm100a}, v(0, 0, false), false},
		{7, 0, []device.Variant{sm75, sm80}, v(0, 0, false), false},
		{9, 0, nil, v(0, 0, false), false},
	} {
		if got, ok := choose(c.have, c.major, c.minor); got != c.want || ok != c.ok {
			t.Errorf("for %d.%d of %v: %v, %v; want %v, %v", c.major, c.minor, c.have, got, ok, c.want, c.ok)
		}
	}
}
