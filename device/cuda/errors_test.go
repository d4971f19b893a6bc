//go:build linux

// This file tests the words and numbers of the driver's errors.

package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Only results of kernels that ran say that earlier work caused them.
func TestEarlierWork(t *testing.T) {
	for r, earlier := range map[result]bool{1: false, errIllegalAddress - 1: false, errIllegalAddress: true, 717: true, errLaunchFailure: true, errLaunchFailure + 1: false, 999: false} {
		d, f := openFake(t, Options{})
		f.excused = true
		err := d.broken(&failure{&d.drv.memcpyAsync, r})
		var said *device.DriverError
		if !errors.As(err, &said) || said.Code != int(r) || said.Call != "cuMemcpyAsync" || said.Device != "cuda:0" || strings.HasSuffix(said.Text, "; work issued earlier caused it") != earlier {
			t.Errorf("result %d: %+v", r, err)
		}
		_ = d.Close()
	}
	for r, want := range map[result]bool{errCaptureFirst - 1: false, errCaptureFirst: true, 904: true, errCaptureLast: true, errCaptureLast + 1: false} {
		if r.byCapture() != want {
			t.Errorf("result %d comes of a capture: %v", r, !want)
		}
	}
}

// An error that the driver has no name for has its number.
func TestNamelessResults(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	f.fail["cuGetErrorName"] = errInvalidValue
	if got := v.text(123); got != "error 123, which the driver does not know" {
		t.Error(got)
	}
	clear(f.fail)
	if got := v.text(123); got != "CUDA_ERROR_MADE_UP: a test asked for it" {
		t.Error(got)
	}
}

// A kernel that cannot be loaded is named, with its image and what the driver says.
func TestKernelsThatTheDriverRefuses(t *testing.T) {
	other := *addKernel
	other.Image = &device.Image{Name: "new.cu", Variants: []device.Variant{{Major: 99, PTX: "x"}}}
	for _, x := range []struct {
		kernel *device.Kernel
		call   string // that fails
		code   result
		words  []string
	}{
		{addKernel, "cuModuleLoadDataEx", 218, []string{addKernel.Image.Name + " for capability ", ": CUDA_ERROR_MADE_UP: a test asked for it"}},
		{addKernel, "cuModuleGetFunction", 500, []string{"kernel " + addKernel.Name + " of " + addKernel.Image.Name + ": CUDA_ERROR_MADE_UP"}},
		{&other, "", errNoBinary, []string{"no variant of new.cu runs on a GPU of capability 9.0"}},
	} {
		d, f := openFake(t, Options{})
		f.excused = true
		s := newStream(t, d, "s")
		b := alloc(t, d, memory.Device, 64)
		if x.call != "" {
			f.fail[x.call] = x.code
		}
		l := addLaunch(b.All(), 1)
		l.Kernel = x.kernel
		s.Launch(l)
		err := s.Sync()
		clear(f.fail)
		var said *device.DriverError
		if x.call == "" {
			x.call = "cuModuleLoadDataEx"
		}
		if !errors.As(err, &said) || said.Call != x.call || said.Code != int(x.code) || said.Device != "cuda:0" {
			t.Errorf("%s: %+v", x.call, err)
		} else {
			for _, w := range x.words {
				if !strings.Contains(said.Text, w) {
					t.Errorf("%s: %q, want %q", x.call, said.Text, w)
				}
			}
			if strings.HasSuffix(said.Text, ": ") {
				t.Errorf("%s: %q ends with nothing", x.call, said.Text)
			}
		}
		s.Free(b)
		_ = d.Close()
	}
}

// A callback that panics is the error of its device.
func TestPanicOfACallback(t *testing.T) {
	d, f := openFake(t, Options{})
	f.excused = true
	s := newStream(t, d, "s")
	s.Host(func() { panic("no idea") })
	var said *device.DriverError
	if err := s.Sync(); !errors.As(err, &said) || *said != (device.DriverError{Device: "cuda:0", Call: "host callback", Text: "no idea"}) {
		t.Errorf("%+v", err)
	}
	_ = d.Close()
}
