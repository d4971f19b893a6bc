// This file owns attention on a GPU: which compiled kernel computes heads of a size, with
// which grid and shared memory. attention.cu and attentionplain.cu are compiled for the
// same shapes.

package nn

import (
	_ "embed"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

var (
	//go:embed attention_sm80.ptx
	attentionPTX string
	//go:embed attentionplain_sm80.ptx
	attentionPlainPTX string

	attentionImage      = image("nn/attention.cu", attentionPTX)
	attentionPlainImage = image("nn/attentionplain.cu", attentionPlainPTX)
)

// attendTiles is the work of a block. It owns 16 x high rows a warp, and step rows at a
// time pass by, in the given number of stages.
type attendTiles struct{ warps, high, step, stages int }

func (t attendTiles) rows() int { return 16 * t.high * t.warps }

// attendShape has the kernels for heads up to a size. They pad heads to it.
type attendShape struct {
	kind                         kernels.Number
	keys, values                 int
	forward, backward            attendTiles
	split                        int // blocks that share the gradients of keys and values
	attend                       device.Kernel
	delta, gradKeys, gradQueries device.Kernel
}

var attendShapes = [...]attendShape{
	newAttendShape(kernels.BF16, "64", 64, 64, attendTiles{4, 2, 64, 2}, attendTiles{4, 1, 64, 2}, 1),
	newAttendShape(kernels.BF16, "128", 128, 128, attendTiles{4, 2, 64, 2}, attendTiles{4, 1, 64, 2}, 1),
	newAttendShape(kernels.BF16, "192", 192, 128, attendTiles{4, 2, 32, 2}, attendTiles{4, 1, 32, 2}, 1),
	newAttendShape(kernels.BF16, "256", 256, 256, attendTiles{4, 1, 32, 2}, attendTiles{4, 1, 32, 1}, 2),
	newAttendShape(kernels.F32, "128", 128, 128, attendTiles{4, 1, 32, 2}, attendTiles{4, 1, 32, 1}, 1),
	newAttendShape(kernels.F32, "256", 256, 256, attendTiles{2, 1, 16, 2}, attendTiles{2, 1, 16, 1}, 2),
}

func newAttendShape(kind kernels.Number, name string, keys, values int, forward, backward attendTiles, split int) attendShape {
	image, plain := attentionImage, ""
	if kind == kernels.F32 {
		image, plain = attentionPlainImage, "plain_"
	}
	kernel := func(name string, twin func(*device.Launch)) device.Kernel {
		return device.Kernel{Name: "stowage_nn_attend_" + name, Image: image, Go: twin}
	}
	done := func(*device.Launch) {}
	return attendShape{
		kind: kind, keys: keys, values: values, forward: forward, backward: backward, split: split,
		attend: kernel(plain+name, attendTwin), delta: kernel(plain+"delta", attendGradTwin),
		gradKeys: kernel("keys_"+plain+name, done), gradQueries: kernel("queries_"+plain+name, done),
	}
}

// shape returns the smallest shape that holds the heads. There is none for heads beyond the
// largest, and a GPU then ends the kernel with an error.
func (a *Attention) shape() *attendShape {
	best := 0
	for i := range attendShapes {
		s := &attendShapes[i]
		if s.kind != a.Q.Type {
			continue
		}
		best = i
		if a.KeyDim <= s.keys && a.ValueDim <= s.values {
			break
		}
	}
	return &attendShapes[best]
}

// GradStep is one of the kernels of the backward pass. On the CPU the first one does all
// the work, because it computes scores once for all gradients.
type GradStep int

const (
	GradDelta GradStep = iota
	GradKeys
	GradQueries
	gradSteps
)

// attendThreads is the number of threads of a block that sums up rows, with a warp for each
// row.
const attendThreads = 128

// gpuLaunch returns the launch of the forward pass without arguments.
func (a *Attention) gpuLaunch() device.Launch {
	s := a.shape()
	t := s.forward
	numbers := max(t.rows()*s.keys+t.stages*t.step*(s.keys+s.values), t.rows()*s.values)
	return a.tiles(&s.attend, t, a.Heads, numbers*int(s.kind.Size()))
}

// gpuLaunch returns the launch of a step of the backward pass without arguments.
func (a *AttentionGrad) gpuLaunch(step GradStep) device.Launch {
	s := a.shape()
	t := s.backward
	// LSE and Delta of the rows that pass by are two fp32 numbers.
	room := (t.rows()+t.stages*t.step)*(s.keys+s.values)*int(s.kind.Size()) + t.stages*t.step*2*4
	switch step {
	case GradDelta:
		const each = attendThreads / 32
		return device.NewLaunch(&s.delta, (a.Batch*a.Seq*a.Heads+each-1)/each, attendThreads)
	case GradKeys:
		return a.tiles(&s.gradKeys, t, a.KVHeads*s.split, room)
	case GradQueries:
		return a.tiles(&s.gradQueries, t, a.Heads, room)
	}
	panic(fmt.Sprintf("nn: attention's backward pass has no step %d", step))
}

// tiles sets a grid with a block for each tile of own rows of each head.
func (a *Attention) tiles(k *device.Kernel, t attendTiles, heads, room int) device.Launch {
	l := device.NewLaunch(k, a.Batch*heads*((a.Seq+t.rows()-1)/t.rows()), 32*t.warps)
	l.Shared = uint32(room)
	return l
}
