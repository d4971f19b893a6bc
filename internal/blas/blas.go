// Package blas does dense matrix products on NVIDIA GPUs with cuBLASLt. It finds the
// library on the machine and needs no cgo. If there is none, [New] returns a
// [device.Unsupported], and Stowage's own kernels do the products.
//
// Products are as reproducible as those of the kernels. For a given library and GPU, the
// shape of a product alone decides how it is computed: one algorithm, chosen once, works
// for every address, adds in one sequence (no partial sums that blocks add later) and
// needs no workspace. Products share nothing, so they can run on many streams and in
// graphs, and they use no device memory of their own. fp32 stays fp32; tensor cores are
// used for bf16 only.
package blas

// This file owns the assistant and its products; plan.go how a product is set up,
// library.go the library, abi.go its binary interface.

import (
	"fmt"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// Products does the products of one device. Its life cycle:
//
//  1. New opens it while the device's context is current.
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

// room is what algorithms may use beyond the operands: nothing. Tests measure what more
// would gain.
type room struct {
	addr, size uintptr // a workspace
	reductions uint32  // bits of cublasLtReductionScheme_t
}

var _ cuda.Assist = (*Products)(nil)

// New opens the library; give it to cuda.Options.Assist. If a library does not start, for
// example because the driver is older than the library, New tries the next one. It returns
// a [device.Unsupported] if none starts.
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
		case errAllocFailed: // it may start another time, and results would differ
			return nil, lib.failed(&lib.create, s)
		}
		why = fmt.Errorf("%s does not start: %w", name, lib.failed(&lib.create, s))
	}
	return nil, &device.Unsupported{
		What: "cuBLASLt", Why: why.Error(),
		Need: "install libcublas of CUDA 12 or 13, for example with `pip install nvidia-cublas-cu12`",
	}
}

func newProducts(lib *library) (*Products, status) {
	p := &Products{lib: lib, calls: sync.Pool{New: func() any { return new([16]uintptr) }}, plans: map[product]*plan{}}
	var handle uint64
	s := lib.create.call(uintptr(pointer(&handle)))
	p.handle = uintptr(handle)
	return p, s
}

// dense lists the kernels of dense products that package nn launches.
var dense = func() map[*device.Kernel]bool {
	all := map[*device.Kernel]bool{}
	none := device.NewBuffer(memory.Device, uintptr(device.Align), 4, 4, "none").All()
	for i := range 8 {
		x := nn.NewMatrix(none, kernels.Number(i&1), 1, 1)
		all[nn.GemmLaunch(nn.Product{A: x, B: x, C: x, TransA: i&2 != 0, TransB: i&4 != 0}).Kernel] = true
	}
	return all
}()

// Takes implements [cuda.Assist]: it reports whether k is a dense product.
func (p *Products) Takes(k *device.Kernel) bool { return dense[k] }

// Launch implements [cuda.Assist]. It leaves products to the kernel that are small, not
// aligned, or of types for which the library has no algorithm.
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
	// C = op(A) op(B) stored by rows is Cᵀ = op(B)ᵀ op(A)ᵀ stored by columns.
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
		// The library checks some things, such as whether Plus is C, only when it
		// is called. It refuses the same product every time.
		pl.refused.Store(true)
		return false, nil
	}
	return false, p.lib.failed(&p.lib.matmul, s)
}

// Close ends the assistant.
func (p *Products) Close() {
	for _, pl := range p.plans {
		p.destroyPlan(pl)
	}
	p.lib.destroy.call(p.handle)
}
