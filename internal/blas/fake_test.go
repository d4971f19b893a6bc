//go:build linux

// This file owns a simulated cuBLASLt in Go: the functions that the package calls, on
// host memory in column order, with the constants of the library's documentation.

package blas

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
)

// fake is a simulated library.
type fake struct {
	mu      sync.Mutex
	objects map[uintptr]any
	next    uintptr
	fail    map[string]status // what a function returns from now on
	calls   map[string]int
	offers  []offer // what the heuristic has
	prefs   []fakePreference
	ran     []uint64 // algorithms, by what they were made for
	streams []uintptr
}

// offer is a candidate that a test chooses. Its reduction is what the algorithm does.
type offer struct {
	reduction uint32
	workspace uint64
	state     status
}

type (
	fakeHandle     struct{}
	fakeDesc       map[uintptr]int32
	fakePreference map[uintptr]uint64
)

type fakeLayout struct{ typ, rows, cols, pitch int }

// theFake is the library behind the C functions, because purego makes only a limited
// number of those.
var theFake atomic.Pointer[fake]

type args = [16]uintptr

var fakeProcs = sync.OnceValue(func() map[string]uintptr {
	procs := map[string]uintptr{}
	for name := range new(library).symbols() {
		procs[name] = purego.NewCallback(func(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p uintptr) uintptr {
			return theFake.Load().call(name, args{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p})
		})
	}
	return procs
})

// newFake returns a library and the products on it.
func newFake(t testing.TB) (*Products, *fake) {
	t.Helper()
	f := &fake{objects: map[uintptr]any{}, next: 0x100, fail: map[string]status{}, calls: map[string]int{}, offers: []offer{{}}}
	theFake.Store(f)
	p, s := newProducts(fakeLibrary())
	if s != success {
		t.Fatal(s)
	}
	t.Cleanup(func() {
		p.Close()
		if len(f.objects) > 0 {
			t.Errorf("%d objects of the library are left: %v", len(f.objects), f.objects)
		}
	})
	return p, f
}

func fakeLibrary() *library {
	l := &library{}
	for name, p := range l.symbols() {
		*p = proc{name, fakeProcs()[name]}
	}
	return l
}

func (f *fake) call(name string, a args) uintptr {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[name]++
	if name == "cublasLtGetStatusName" {
		return statusText
	}
	if s := f.fail[name]; s != success {
		return uintptr(s)
	}
	return uintptr(fakeFuncs[name](f, &a))
}

// statusText is a C string that is never moved or freed.
var statusText = uintptr(unsafe.Pointer(&[]byte("CUBLAS_STATUS_MADE_UP\x00")[0]))

func at[T any](addr uintptr) *T { return &device.Slice[T](uint64(addr), 1)[0] }

// add keeps an object under a new handle.
func (f *fake) add(out uintptr, x any) status {
	f.next += 16
	f.objects[f.next] = x
	*at[uintptr](out) = f.next
	return success
}

// drop removes an object of a kind.
func drop[T any](f *fake, a *args) status {
	if _, ok := f.objects[a[0]].(T); !ok {
		return errInvalidValue
	}
	delete(f.objects, a[0])
	return success
}

var fakeFuncs map[string]func(f *fake, a *args) status

func init() {
	fakeFuncs = map[string]func(f *fake, a *args) status{
		"cublasLtCreate":                  func(f *fake, a *args) status { return f.add(a[0], fakeHandle{}) },
		"cublasLtDestroy":                 drop[fakeHandle],
		"cublasLtMatmulDescDestroy":       drop[fakeDesc],
		"cublasLtMatrixLayoutDestroy":     drop[fakeLayout],
		"cublasLtMatmulPreferenceDestroy": drop[fakePreference],
		"cublasLtMatmulDescCreate": func(f *fake, a *args) status {
			if a[1] != 68 || a[2] != 0 {
				return errNotSupported
			}
			return f.add(a[0], fakeDesc{})
		},
		"cublasLtMatmulDescSetAttribute": func(f *fake, a *args) status {
			if a[3] != 4 {
				return errInvalidValue
			}
			f.objects[a[0]].(fakeDesc)[a[1]] = *at[int32](a[2])
			return success
		},
		"cublasLtMatrixLayoutCreate": func(f *fake, a *args) status {
			if a[4] < a[2] {
				return errInvalidValue
			}
			return f.add(a[0], fakeLayout{int(a[1]), int(a[2]), int(a[3]), int(a[4])})
		},
		"cublasLtMatmulPreferenceCreate": func(f *fake, a *args) status { return f.add(a[0], fakePreference{}) },
		"cublasLtMatmulPreferenceSetAttribute": func(f *fake, a *args) status {
			p := f.objects[a[0]].(fakePreference)
			switch wide := a[1] == 1 || a[1] == 12; {
			case wide && a[3] == 8:
				p[a[1]] = *at[uint64](a[2])
			case !wide && a[3] == 4:
				p[a[1]] = uint64(*at[uint32](a[2]))
			default:
				return errInvalidValue
			}
			return success
		},
		"cublasLtMatmulAlgoGetHeuristic": (*fake).heuristic,
		"cublasLtMatmulAlgoConfigGetAttribute": func(_ *fake, a *args) status {
			if a[1] != 3 || a[3] != 4 {
				return errInvalidValue
			}
			*at[uint32](a[2]) = uint32(at[algorithm](a[0])[1])
			return success
		},
		"cublasLtMatmul": (*fake).matmul,
	}
}

// shape returns a product by its layouts, or why they do not match.
func (f *fake) shape(desc, a, b, c, d uintptr) (m, n, k int, err error) {
	op := f.objects[desc].(fakeDesc)
	la, lb, lc, ld := f.objects[a].(fakeLayout), f.objects[b].(fakeLayout), f.objects[c].(fakeLayout), f.objects[d].(fakeLayout)
	turn := func(l fakeLayout, by int32) (int, int) {
		if by == 1 {
			return l.cols, l.rows
		}
		return l.rows, l.cols
	}
	m, k = turn(la, op[3])
	k2, n := turn(lb, op[4])
	if k2 != k || lc.rows != m || lc.cols != n || ld.rows != m || ld.cols != n || lc.typ != ld.typ || la.typ != lb.typ || la.typ == 0 && ld.typ != 0 {
		return 0, 0, 0, fmt.Errorf("a product of %v and %v plus %v is no %v", la, lb, lc, ld)
	}
	return m, n, k, nil
}

// heuristic returns the offers of the test, marked with the shape and their place.
func (f *fake) heuristic(a *args) status {
	m, n, k, err := f.shape(a[1], a[2], a[3], a[4], a[5])
	if err != nil || f.objects[a[0]] != (fakeHandle{}) {
		return errInvalidValue
	}
	f.prefs = append(f.prefs, f.objects[a[6]].(fakePreference))
	offers := f.offers[:min(len(f.offers), int(a[7]))]
	for i, o := range offers {
		device.Slice[candidate](uint64(a[8]), int(a[7]))[i] = candidate{
			algo:      algorithm{uint64(m*n*k)<<8 | uint64(i+1), uint64(o.reduction)},
			workspace: o.workspace, state: o.state,
		}
	}
	*at[int32](a[9]) = int32(len(offers))
	return success
}

func (f *fake) matmul(a *args) status {
	m, n, k, err := f.shape(a[1], a[4], a[6], a[9], a[11])
	algo := at[algorithm](a[12])[0]
	for _, p := range []uintptr{a[3], a[5], a[8], a[10]} {
		if p%aligned != 0 {
			return errInvalidValue
		}
	}
	if err != nil || f.objects[a[0]] != (fakeHandle{}) || algo>>8 != uint64(m*n*k) || a[8] == a[10] && a[9] != a[11] || a[13] != 0 || a[14] != 0 {
		return errInvalidValue
	}
	f.ran, f.streams = append(f.ran, algo), append(f.streams, a[15])
	op, alpha, beta := f.objects[a[1]].(fakeDesc), *at[float32](a[2]), *at[float32](a[7])
	// Rows of op(A) and columns of op(B), each in one piece.
	x, y := f.read(a[3], a[4], 1-op[3]), f.read(a[5], a[6], op[4])
	c := make([]float32, m*n)
	if beta != 0 {
		c = f.read(a[8], a[9], 0)
	}
	d := f.objects[a[11]].(fakeLayout)
	for j := range n {
		for i := range m {
			write(a[10], d, i, j, alpha*dot(x[i*k:][:k], y[j*k:][:k])+beta*c[j*m+i])
		}
	}
	return success
}

// dot does most of the work, and would take most of the time under the race detector.
//
//go:norace
func dot(x, y []float32) (sum float32) {
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

// read returns op of a matrix as fp32, column after column without gaps.
func (f *fake) read(addr, layout uintptr, op int32) []float32 {
	l := f.objects[layout].(fakeLayout)
	out := make([]float32, l.rows*l.cols)
	for j := range l.cols {
		for i := range l.rows {
			to := j*l.rows + i
			if op == 1 {
				to = i*l.cols + j
			}
			if l.typ == 14 {
				out[to] = math.Float32frombits(uint32(*at[uint16](addr + uintptr(2*(j*l.pitch+i)))) << 16)
			} else {
				out[to] = *at[float32](addr + uintptr(4*(j*l.pitch+i)))
			}
		}
	}
	return out
}

func write(addr uintptr, l fakeLayout, i, j int, v float32) {
	if l.typ == 0 {
		*at[float32](addr + uintptr(4*(j*l.pitch+i))) = v
		return
	}
	b := math.Float32bits(v)
	*at[uint16](addr + uintptr(2*(j*l.pitch+i))) = uint16((b + 0x7fff + b>>16&1) >> 16) // to nearest even
}

// last returns the algorithm that ran last.
func (f *fake) last() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Concat([]uint64{0}, f.ran)[len(f.ran)]
}
