// This file owns the library: where it is found, and its functions.

package blas

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
)

// proc is one function of the library.
type proc struct {
	name string
	addr uintptr
}

// library is cuBLASLt, opened.
type library struct {
	create, destroy, statusName                        proc
	descCreate, descDestroy, descSet                   proc
	layoutCreate, layoutDestroy                        proc
	preferenceCreate, preferenceDestroy, preferenceSet proc
	algoGetHeuristic, algoConfigGet, matmul            proc
}

// symbols pairs every function with its name in the library.
func (l *library) symbols() map[string]*proc {
	return map[string]*proc{
		"cublasLtCreate": &l.create, "cublasLtDestroy": &l.destroy, "cublasLtGetStatusName": &l.statusName,
		"cublasLtMatmulDescCreate": &l.descCreate, "cublasLtMatmulDescDestroy": &l.descDestroy,
		"cublasLtMatmulDescSetAttribute": &l.descSet,
		"cublasLtMatrixLayoutCreate":     &l.layoutCreate, "cublasLtMatrixLayoutDestroy": &l.layoutDestroy,
		"cublasLtMatmulPreferenceCreate": &l.preferenceCreate, "cublasLtMatmulPreferenceDestroy": &l.preferenceDestroy,
		"cublasLtMatmulPreferenceSetAttribute": &l.preferenceSet,
		"cublasLtMatmulAlgoGetHeuristic":       &l.algoGetHeuristic,
		"cublasLtMatmulAlgoConfigGetAttribute": &l.algoConfigGet,
		"cublasLtMatmul":                       &l.matmul,
	}
}

// files are the versions that work, the newest first.
var files = []string{"libcublasLt.so.13", "libcublasLt.so.12"}

// Names returns the names under which the library is looked for, in order: the names that
// the loader resolves, then files in the folders of CUDA toolkits and Python packages.
func Names() []string { return names(os.Getenv) }

func names(env func(string) string) []string {
	all := slices.Clone(files)
	add := func(folder string) {
		for _, file := range files {
			found, _ := filepath.Glob(filepath.Join(folder, file)) // a folder that is no pattern has none
			slices.Reverse(found)                                  // the newest first
			all = append(all, found...)
		}
	}
	for _, home := range []string{env("CUDA_HOME"), env("CUDA_PATH"), "/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda"} {
		if home != "" {
			add(filepath.Join(home, "lib64"))
		}
	}
	for _, root := range []string{env("VIRTUAL_ENV"), env("CONDA_PREFIX"), filepath.Join(env("HOME"), ".local"), "/usr/local", "/usr"} {
		if !filepath.IsAbs(root) {
			continue
		}
		add(filepath.Join(root, "lib"))
		for _, packages := range []string{"site-packages", "dist-packages"} {
			at := filepath.Join(root, "lib", "python3*", packages, "nvidia")
			add(filepath.Join(at, "cu13", "lib"))
			add(filepath.Join(at, "cublas", "lib"))
		}
	}
	return all
}

// load opens a library by name. The library stays loaded. The loader keeps the reason of
// a failure for each thread.
func load(name string) (*library, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	handle, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, err
	}
	l := &library{}
	for symbol, p := range l.symbols() {
		addr, err := purego.Dlsym(handle, symbol)
		if err != nil {
			return nil, fmt.Errorf("%s has no %s", name, symbol)
		}
		*p = proc{symbol, addr}
	}
	return l, nil
}

// call calls the library. Arguments that are addresses must have exactly the form
// uintptr(pointer(&x)), because the compiler then moves x to the heap and keeps it until
// the call returns.
//
//go:uintptrescapes
func (l *library) call(p *proc, args ...uintptr) error {
	if s := p.call(args...); s != success {
		return l.failed(p, s)
	}
	return nil
}

// object makes an object of the library. Constructors take the address of the handle and
// up to four numbers; those that take fewer ignore the rest.
func (l *library) object(p *proc, a [4]uintptr) (uintptr, error) {
	var handle uint64
	err := l.call(p, uintptr(pointer(&handle)), a[0], a[1], a[2], a[3])
	return uintptr(handle), err
}

// set sets an attribute of an object.
func set[T any](l *library, p *proc, object, attribute uintptr, v T) error {
	return l.call(p, object, attribute, uintptr(pointer(&v)), unsafe.Sizeof(v))
}

//go:uintptrescapes
func (p *proc) call(args ...uintptr) status {
	r, _, _ := purego.SyscallN(p.addr, args...)
	return status(int32(r))
}

// failed returns the error for a status, with the library's name for it.
func (l *library) failed(p *proc, s status) error {
	at, _, _ := purego.SyscallN(l.statusName.addr, uintptr(s))
	var name strings.Builder
	for ; at != 0; at++ {
		c := device.Slice[byte](uint64(at), 1)[0]
		if c == 0 {
			break
		}
		name.WriteByte(c)
	}
	return fmt.Errorf("%s failed with status %d, %s", p.name, s, name.String())
}

type pointer = unsafe.Pointer
