// This file owns the loading of kernels: one module for each, kept until the device is
// closed. The driver compiles a module as a whole, and one at a time, so a module holds
// nothing that is not launched.

package cuda

import (
	"bytes"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
)

// function is a kernel as the driver knows it.
type function struct {
	handle uintptr
	shared atomic.Uint32 // the dynamic shared memory it may use
}

// function returns a kernel's function, and loads it at the first launch. It returns nil
// if the device has failed or fails now.
func (d *Device) function(k *device.Kernel) *function {
	if f, ok := d.functions.Load(k); ok {
		return f.(*function)
	}
	if k.Image == nil {
		panic("cuda: kernel " + k.Name + " has no image for GPUs; set Kernel.Image to run it on one")
	}
	d.loading.Lock()
	defer d.loading.Unlock()
	if f, ok := d.functions.Load(k); ok {
		return f.(*function)
	}
	m := d.load(k)
	if m == 0 {
		return nil
	}
	d.modules = append(d.modules, m)
	var handle uint64
	name := append([]byte(k.Name), 0)
	if f := d.tryCall(&d.drv.moduleGetFunction, uintptr(pointer(&handle)), m, uintptr(pointer(&name[0]))); f != nil {
		d.fail(&device.DriverError{
			Device: d.name, Call: f.proc.name, Code: int(f.result),
			Text: fmt.Sprintf("kernel %s of %s: %s", k.Name, k.Image.Name, d.drv.text(f.result)),
		})
		return nil
	}
	f := &function{handle: uintptr(handle)}
	d.functions.Store(k, f)
	return f
}

// load compiles a kernel from the best variant of its image for this GPU. The compiler's
// messages become part of the error.
func (d *Device) load(k *device.Kernel) uintptr {
	p, img := &d.drv.moduleLoadDataEx, k.Image
	v, ok := choose(img.Variants, d.major, d.minor)
	if !ok {
		d.fail(&device.DriverError{
			Device: d.name, Call: p.name, Code: int(errNoBinary),
			Text: fmt.Sprintf("no variant of %s runs on a GPU of capability %d.%d", img.Name, d.major, d.minor),
		})
		return 0
	}
	ptx := append([]byte(only(v.PTX, k.Name)), 0)
	// One heap object, so that the address of the log, which is a number here, stays
	// valid.
	jit := &struct {
		log     [8 << 10]byte
		options [2]uint32
		values  [2]uintptr
		module  uint64
	}{options: [2]uint32{jitErrorLog, jitErrorLogSize}}
	jit.values = [2]uintptr{uintptr(pointer(&jit.log)), uintptr(len(jit.log) - 1)}
	f := d.tryCall(p, uintptr(pointer(&jit.module)), uintptr(pointer(&ptx[0])),
		uintptr(len(jit.options)), uintptr(pointer(&jit.options)), uintptr(pointer(&jit.values)))
	if f == nil {
		return uintptr(jit.module)
	}
	text := fmt.Sprintf("%s for capability %d.%d: %s", img.Name, v.Major, v.Minor, d.drv.text(f.result))
	if said, _, _ := bytes.Cut(jit.log[:], []byte{0}); len(said) > 0 {
		text += ": " + string(bytes.TrimSpace(said))
	}
	d.fail(&device.DriverError{Device: d.name, Call: p.name, Code: int(f.result), Text: text})
	return 0
}

// only returns PTX without the kernels that have other names. It knows the form that clang
// writes, where a kernel ends at the first brace that begins a line, and leaves in what has
// another.
func only(ptx, name string) string {
	var kept strings.Builder
	skip := false
	for line := range strings.Lines(ptx) {
		if entry, ok := strings.CutPrefix(line, ".visible .entry "); ok && !strings.Contains(line, "}") {
			entry, _, _ = strings.Cut(entry, "(")
			skip = entry != name
		}
		if !skip {
			kept.WriteString(line)
		} else if line[0] == '}' {
			skip = false
		}
	}
	return kept.String()
}

// choose returns the newest variant that the GPU runs. Plain PTX runs on its architecture
// and every later one; exact PTX runs on its own only, and is preferred there.
func choose(vs []device.Variant, major, minor int) (best device.Variant, ok bool) {
	rank := func(v device.Variant) int {
		r := 2 * (100*v.Major + v.Minor)
		if v.Exact {
			r++
		}
		return r
	}
	gpu := device.Variant{Major: major, Minor: minor}
	for _, v := range vs {
		runs := rank(v) <= rank(gpu)
		if v.Exact {
			runs = rank(v) == rank(gpu)+1
		}
		if runs && (!ok || rank(v) > rank(best)) {
			best, ok = v, true
		}
	}
	return best, ok
}

// allow makes dynamic shared memory available to a kernel. Without asking it gets 48 KiB less what
// its source declares, which is not known here; so it asks for whatever it uses.
func (d *Device) allow(f *function, shared uint32) bool {
	if shared <= f.shared.Load() {
		return true
	}
	d.loading.Lock()
	defer d.loading.Unlock()
	if shared > f.shared.Load() {
		if !d.callOrFail(&d.drv.funcSetAttribute, f.handle, funcMaxDynamicShare, uintptr(shared)) {
			return false
		}
		f.shared.Store(shared)
	}
	return true
}
