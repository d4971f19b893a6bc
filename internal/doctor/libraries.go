// This file owns the search for shared libraries. They are opened as the
// program would open them later, by the dynamic loader's own rules, so that
// "found" means "will be found".

package doctor

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/internal/blas"
	"github.com/stowage-dev/stowage/internal/mpi"
	"github.com/stowage-dev/stowage/internal/nccl"
)

// Library is an optional shared library.
type Library struct {
	Name     string `json:"name"`
	For      string `json:"for"`
	Path     string `json:"path,omitempty"` // where it was found
	Version  string `json:"version,omitempty"`
	Trouble  string `json:"trouble,omitempty"` // why it exists and cannot be loaded
	NeedsGPU bool   `json:"needs_gpu"`
	Install  string `json:"install"`

	names   []string                    // file names to try, in order; nil for MPI, which has several kinds
	version func(handle uintptr) string // asks the library itself
}

// known lists what Stowage uses.
func known() []Library {
	return []Library{{
		Name: "cuBLASLt", For: "dense matrix products on the GPU", NeedsGPU: true,
		Install: "install libcublas of CUDA 12 or 13 (`pip install nvidia-cublas-cu12` will do); until then our own kernels do them",
		names:   blas.Names(),
		version: cublasVersion,
	}, {
		Name: "NCCL", For: "ranks in several processes, each with a GPU", NeedsGPU: true,
		Install: "install libnccl2 (`pip install nvidia-nccl-cu12` will do)",
		names:   nccl.Names(os.Getenv),
		version: ncclVersion,
	}, {
		Name: "MPI", For: "ranks in several processes, on one machine or many",
		Install: "install MPICH or Open MPI (`apt install mpich` or `apt install openmpi-bin` will do)",
		version: mpiVersion,
	}}
}

// Libraries looks for all of them. All kinds of MPI that are there are listed.
func Libraries() (found []Library) {
	_ = mpi.KeepSignals()
	for _, l := range known() {
		if l.names != nil {
			l.find()
			found = append(found, l)
			continue
		}
		open, relatives := mpi.Names()
		kinds := [][]string{open, relatives}
		if name := os.Getenv("STOWAGE_MPI"); name != "" {
			kinds = [][]string{{name}}
		}
		found = append(found, l.findKinds(kinds)...)
	}
	return found
}

// findKinds finds several libraries of a kind, or says why there is none.
func (l Library) findKinds(kinds [][]string) (found []Library) {
	for _, names := range kinds {
		kind := l
		kind.names = names
		kind.find()
		switch {
		case kind.Path == "":
			l.Trouble = cmp.Or(l.Trouble, kind.Trouble)
		case !slices.ContainsFunc(found, func(other Library) bool { return other.Path == kind.Path }):
			found = append(found, kind)
		}
	}
	if len(found) == 0 {
		return []Library{l}
	}
	return found
}

// find opens the first of the names that the loader knows. The library stays
// loaded: some do not survive being unloaded, and the process ends soon.
func (l *Library) find() {
	for _, name := range l.names {
		handle, err := purego.Dlopen(name, purego.RTLD_LAZY|purego.RTLD_LOCAL)
		if err != nil {
			if !absent(err.Error(), name) {
				l.Trouble = err.Error()
			}
			continue
		}
		l.Path, l.Trouble = loadedFrom(name), ""
		if l.version != nil {
			l.Version = l.version(handle)
		}
		return
	}
}

// absent reports whether a library is missing. If the library exists but another one that
// it needs is missing, the loader names the other one.
func absent(message, name string) bool {
	return strings.HasPrefix(message, name+": cannot open shared object file")
}

// loadedFrom finds the file behind a name among the process's mappings. The
// loader may have followed links, so the mapped file can be libx.so.2.1 for
// libx.so.2.
func loadedFrom(name string) string {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return name
	}
	defer f.Close()
	return mappedFrom(f, name)
}

func mappedFrom(maps io.Reader, name string) string {
	name = path.Base(name)
	stem, _, _ := strings.Cut(name, ".so")
	found := name
	for s := bufio.NewScanner(maps); s.Scan(); {
		_, file, ok := strings.Cut(s.Text(), "/")
		if !ok {
			continue
		}
		if strings.HasPrefix(path.Base(file), name) {
			return "/" + file // two versions can be there: libmpi.so.12 and libmpi.so.40
		}
		base, _, ok := strings.Cut(path.Base(file), ".so")
		if ok && base == stem && found == name {
			found = "/" + file
		}
	}
	return found
}

// call calls a C function of the library. ok is false if the library has no such
// function.
func call(handle uintptr, name string, args ...uintptr) (result uintptr, ok bool) {
	fn, err := purego.Dlsym(handle, name)
	if err != nil {
		return 0, false
	}
	result, _, _ = purego.SyscallN(fn, args...)
	return result, true
}

// cublasVersion: 120304 stands for 12.3.4.
func cublasVersion(handle uintptr) string {
	v, ok := call(handle, "cublasLtGetVersion")
	if !ok {
		return ""
	}
	return dotted(int(v))
}

// ncclVersion: 22105 stands for 2.21.5.
func ncclVersion(handle uintptr) string {
	var v int32
	if _, ok := call(handle, "ncclGetVersion", uintptr(unsafe.Pointer(&v))); !ok {
		return ""
	}
	return dotted(int(v))
}

func dotted(v int) string {
	return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100)
}

// mpiVersion asks for the text that describes the MPI, which the standard allows before
// MPI is initialised. MPICH's text may have 8192 bytes.
func mpiVersion(handle uintptr) string {
	var length int32
	text := make([]byte, 8192)
	if _, ok := call(handle, "MPI_Get_library_version", uintptr(unsafe.Pointer(&text[0])), uintptr(unsafe.Pointer(&length))); !ok {
		return ""
	}
	return mpiName(string(text[:min(max(length, 0), int32(len(text)))]))
}

// mpiName shortens "Open MPI v4.1.4, package: ..." and "MPICH Version:\t4.0.2\n..."
// to name and version.
func mpiName(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	line, _, _ = strings.Cut(line, ",")
	line = strings.ReplaceAll(strings.TrimRight(line, "\x00"), "Version:", " ")
	return strings.Join(strings.Fields(line), " ")
}
