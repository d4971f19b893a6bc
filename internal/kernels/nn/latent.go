// This file owns the step of latent attention between the output of the up projection and
// heads of keys and values, which moves columns.

package nn

import (
	_ "embed"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

var (
	//go:embed latent_sm80.ptx
	latentPTX string

	latentImage  = image("nn/latent.cu", latentPTX)
	spreadKernel = device.Kernel{Name: "stowage_nn_latent_spread", Image: latentImage, Go: spreadTwin}
	gatherKernel = device.Kernel{Name: "stowage_nn_latent_gather", Image: latentImage, Go: gatherTwin}
)

// Latent is keys and values of Heads heads, and what they are made from. A head of KV is
// Nope numbers of its key, and then its value. Shared is the rest of the key, which is the
// same for all heads. A head of K is its Nope numbers, and then Shared. All matrices have
// one type.
type Latent struct {
	K, V       Matrix
	KV, Shared Matrix
	Heads      int
	Nope       int
}

// SpreadLatent issues the forward pass. It writes K and V.
func SpreadLatent(s device.Stream, l Latent) {
	s.Launch(l.launch(&spreadKernel, device.Write, device.Read))
}

// GatherLatent issues the backward pass, with gradients in all matrices. It writes KV and
// Shared, and sums Shared over the heads in order.
func GatherLatent(s device.Stream, l Latent) {
	s.Launch(l.launch(&gatherKernel, device.Read, device.Write))
}

// latentThreads is the number of threads of a block. There is a block for each row.
const latentThreads = 128

// launch has the arguments
//
//	0..3  K, V, KV, Shared
//	4     pitches of K and V, 32 bits each
//	5     pitches of KV and Shared
//	6     Heads | Nope << 16 | columns of Shared << 32 | a head of V << 48
//	7     rows; bit 63 is set for bf16
func (l *Latent) launch(k *device.Kernel, heads, latent device.Mode) device.Launch {
	rows, rope := l.KV.Rows, l.Shared.Cols
	if l.Heads <= 0 || l.Nope <= 0 || l.V.Cols%l.Heads != 0 || max(l.Heads, l.Nope, rope, l.V.Cols/l.Heads) > maxHeads {
		panic(fmt.Sprintf("nn: latent attention with %d heads of %d numbers beside shared ones and values of %d columns is invalid; expected columns that divide into the heads", l.Heads, l.Nope, l.V.Cols))
	}
	l.K.shape("latent attention's keys", rows, l.Heads*(l.Nope+rope))
	l.V.shape("latent attention's values", rows, l.V.Cols)
	l.KV.shape("latent attention's keys and values", rows, l.Heads*l.Nope+l.V.Cols)
	l.Shared.shape("latent attention's shared keys", rows, rope)
	if l.K.Type != l.KV.Type || l.V.Type != l.KV.Type || l.Shared.Type != l.KV.Type {
		panic("nn: latent attention: expected matrices of one type")
	}
	to := device.NewLaunch(k, rows, latentThreads)
	passMatrix(&to, "latent attention's keys", l.K, heads)
	passMatrix(&to, "latent attention's values", l.V, heads)
	passMatrix(&to, "latent attention's keys and values", l.KV, latent)
	passMatrix(&to, "latent attention's shared keys", l.Shared, latent)
	to.Arg(uint64(l.K.pitch()) | uint64(l.V.pitch())<<32)
	to.Arg(uint64(l.KV.pitch()) | uint64(l.Shared.pitch())<<32)
	to.Arg(uint64(l.Heads) | uint64(l.Nope)<<16 | uint64(rope)<<32 | uint64(l.V.Cols/l.Heads)<<48)
	to.Arg(uint64(rows) | uint64(l.KV.Type)<<63)
	return to
}

func spreadTwin(l *device.Launch) {
	w := newLatentWork(l.Args())
	w.each(func(row int, k, v, kv, shared []float32) {
		w.kv.read(kv, row, 0, 1, len(kv))
		w.shared.read(shared, row, 0, 1, len(shared))
		for h := range w.heads {
			key, from := k[h*(w.nope+w.rope):], kv[h*(w.nope+w.value):]
			copy(key[:w.nope], from)
			copy(key[w.nope:], shared)
			copy(v[h*w.value:][:w.value], from[w.nope:])
		}
		w.k.write(k, row, 0, 1, len(k))
		w.v.write(v, row, 0, 1, len(v))
	})
}

func gatherTwin(l *device.Launch) {
	w := newLatentWork(l.Args())
	w.each(func(row int, k, v, kv, shared []float32) {
		w.k.read(k, row, 0, 1, len(k))
		w.v.read(v, row, 0, 1, len(v))
		clear(shared)
		for h := range w.heads {
			key, to := k[h*(w.nope+w.rope):], kv[h*(w.nope+w.value):]
			copy(to[:w.nope], key)
			copy(to[w.nope:], v[h*w.value:][:w.value])
			vec.Add(shared, shared, key[w.nope:])
		}
		w.kv.write(kv, row, 0, 1, len(kv))
		w.shared.write(shared, row, 0, 1, len(shared))
	})
}

// latentWork is a launch as the twins see it.
type latentWork struct {
	k, v, kv, shared         view
	rows                     int
	heads, nope, rope, value int
}

func newLatentWork(a []uint64) *latentWork {
	typ := kernels.Number(a[7] >> 63)
	return &latentWork{
		k: view{a[0], int(uint32(a[4])), typ}, v: view{a[1], int(a[4] >> 32), typ},
		kv: view{a[2], int(uint32(a[5])), typ}, shared: view{a[3], int(a[5] >> 32), typ},
		rows: int(uint32(a[7])), heads: int(uint16(a[6])), nope: int(uint16(a[6] >> 16)),
		rope: int(uint16(a[6] >> 32)), value: int(uint16(a[6] >> 48)),
	}
}

// A goroutine handles latentRows rows at a time, which is enough work for a turn.
const latentRows = 64

// each calls f for every row, with room for the row of each matrix.
func (w *latentWork) each(f func(row int, k, v, kv, shared []float32)) {
	parallel.For(w.rows, latentRows, func(from, to int) {
		room := attendRooms.Get().(*attendRoom)
		defer attendRooms.Put(room)
		room.reset()
		k, v := room.alloc(w.heads*(w.nope+w.rope)), room.alloc(w.heads*w.value)
		kv, shared := room.alloc(w.heads*(w.nope+w.value)), room.alloc(w.rope)
		for row := from; row < to; row++ {
			f(row, k, v, kv, shared)
		}
	})
}
