// This file owns tuned launches: another kernel for the same work, for GPUs of one
// architecture.

package device

import "fmt"

// Tuned is another kernel that does the work of a launch, for GPUs that its image has a
// variant for. Such a GPU runs it instead of [Launch].Kernel; every other device ignores
// it. The kernel takes the arguments of the launch and then the tensor maps. The zero
// Tuned is none.
type Tuned struct {
	// Kernel has a name and an image. Its other fields are not used.
	Kernel *Kernel
	Grid   [3]uint32 // blocks
	Block  [3]uint32 // threads of a block
	Shared uint32    // bytes of dynamic shared memory
	// Cluster is the number of blocks that run side by side, which the kernel was
	// compiled for. Zero is one.
	Cluster uint32
	// Resident limits the blocks along x to one for each multiprocessor of the GPU.
	Resident bool
	// Early lets the kernel begin before the launch before it on the stream has ended: when
	// each of that one's blocks has let it, or has ended. That launch is one of the kernel that
	// this one was written to follow, and did not begin early itself. This kernel waits for the
	// end of that one before it ends. Before it waits, it reads only what blocks of that one
	// wrote before they let it, and writes nothing that that one still reads or writes. In a
	// graph it begins in order.
	Early bool

	nmaps uint8
	maps  [maxMaps]TensorMap
}

const maxMaps = 8

// TensorMap describes a matrix of bf16 to the copying unit of a GPU, which moves boxes of
// BoxRows rows and 64 columns between the matrix and shared memory. The 16-byte vectors of
// a row are permuted there (swizzled over 128 bytes). What lies outside of the matrix is
// read as zeros and not written.
type TensorMap struct {
	Addr       uintptr // a multiple of 16
	Rows, Cols uint32
	Pitch      uint32 // numbers from a row to the next, a multiple of 8
	BoxRows    uint32 // at most 256
}

// Map appends a tensor map. It panics if no GPU could use it, or if there are eight
// already.
func (t *Tuned) Map(m TensorMap) {
	switch {
	case m.Addr%16 != 0 || m.Pitch%8 != 0 || m.Rows == 0 || m.Cols == 0 || m.Pitch < m.Cols || m.BoxRows == 0 || m.BoxRows > 256:
		panic(fmt.Sprintf("device: a tensor map of %+v; expected rows at multiples of 16 bytes and boxes of 1 to 256 rows", m))
	case t.nmaps == maxMaps:
		panic("device: kernel " + t.Kernel.Name + " has more than 8 tensor maps; pass a table in memory")
	}
	t.maps[t.nmaps] = m
	t.nmaps++
}

// Maps returns the tensor maps in order.
func (t *Tuned) Maps() []TensorMap { return t.maps[:t.nmaps] }
