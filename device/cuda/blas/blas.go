// Package blas does dense matrix products on NVIDIA GPUs by cuBLASLt, which it finds
// on the machine: no cgo, nothing to build against. Where there is none, New says so
// with [device.Unsupported] and products are left to our own kernels.
//
// Products are as reproducible as those of the kernels. How one is computed follows
// from its shape alone, for a given library and GPU: one algorithm, chosen once, that
// works for every address, sums in one sequence (no parts of a sum that blocks add up
// later) and needs no workspace. Nothing is shared between products, so that they
// can run on many streams and in graphs, wherever these are replayed, and no memory
// of the device is used up. fp32 stays fp32: tensor cores are for bf16.
//
// This file owns the assistant and its products; plan.go how one is set up,
// library.go the library, abi.go its binary interface.
package blas

import (
	"fmt"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/kernels/nn"
)

// Products does the products of one device. Its life cycle:
//
//  1. New makes it while the device's context is current.
//  2. Launch issues products, from any goroutine.
//  3. Close ends it; no product is in flight then.
type Products struct {
	lib    *library
	handle uintptr
	room   room
	calls  sync.Pool // *[16]uintptr

	mu    sync.RWMutex
	plans map[product]*plan
}

// room is what algorithms may have beyond the operands: nothing. Tests measure what
// more would bring.
type room struct {
	addr, size uintptr // a workspace
	reductions uint32  // bits of cublasLtReductionScheme_t
}

var _ cuda.Assist = (*Products)(nil)

// New is what cuda.Options.Assist wants. A library that does not start, because the
// driver is older than it for instance, gives way to the next one.
func New() (cuda.Assist, error) { return open(Names(), load) }

func open(names []string, load func(name string) (*library, error)) (cuda.Assist, error) {
	var why error
	for _, name := range names {
		lib, err := load(name)
		if err != nil {
			if why == nil {
				why = err
			}
			continue
		}
		p, s := newProducts(lib)
		switch s {
		case success:
			return p, nil
		case errAllocFailed: // another time it may start, and results would differ
			return nil, lib.failed(&lib.create, s)
		}
		why = fmt.Errorf("%s does not start: %w", name, lib.failed(&lib.create, s))
	}
	return nil, &device.Unsupported{
		What: "cuBLASLt", Why: why.Error(),
		Need: "install libcublas of CUDA 12 or 13 (`pip install nvidia-cublas-cu12` will do)",
	}
}

func newProducts(lib *library) (*Products, status) {
	p := &Products{lib: lib, calls: sync.Pool{New: func() any { return new([16]uintptr) }}, plans: map[product]*plan{}}
	var handle uint64
	s := lib.create.call(uintptr(pointer(&handle)))
	p.handle = uintptr(handle)
	return p, s
}

// dense are the kernels of dense products, as nn's own launches name them.
var dense = func() map[*device.Kernel]bool {
	all := map[*device.Kernel]bool{}
	none := device.NewBuffer(device.Accel, uintptr(device.Align), 4, 4, "none").All()
	for i := range 8 {
		x := nn.NewMatrix(none, kernels.Number(i&1), 1, 1)
		all[nn.GemmLaunch(nn.Product{A: x, B: x, C: x, TransA: i&2 != 0, TransB: i&4 != 0}).Kernel] = true
	}
	return all
}()

func (p *Products) Takes(k *device.Kernel) bool { return dense[k] }

func (p *Products) Launch(_ *device.Kernel, args []uint64, stream uintptr) (done bool, err error) {
	x := productOf(args)
	if !x.suits(args) {
		return false, nil
	}
	pl, err := p.planOf(x)
	if err != nil || pl.refused.Load() {
		return false, err
	}
	plus := args[3]
	if plus == 0 {
		plus = args[2]
	}
	call := p.calls.Get().(*[16]uintptr)
	// Row after row, C = op(A) op(B) is column after column Cᵀ = op(B)ᵀ op(A)ᵀ.
	*call = [16]uintptr{
		p.handle, pl.desc, uintptr(pointer(&pl.one)), uintptr(args[1]), pl.b, uintptr(args[0]), pl.a,
		uintptr(pointer(&pl.beta)), uintptr(plus), pl.plus, uintptr(args[2]), pl.c,
		uintptr(pointer(&pl.algo)), p.room.addr, p.room.size, stream,
	}
	s := p.lib.matmul.call(call[:]...)
	p.calls.Put(call)
	switch s {
	case success:
		return true, nil
	case errNotSupported:
		// The library looks at some things, such as whether Plus is C, when it is
		// called. It says no to the same product every time.
		pl.refused.Store(true)
		return false, nil
	}
	return false, p.lib.failed(&p.lib.matmul, s)
}

// Close ends the assistant.
func (p *Products) Close() {
	for _, pl := range p.plans {
		p.drop(pl)
	}
	p.lib.destroy.call(p.handle)
}
