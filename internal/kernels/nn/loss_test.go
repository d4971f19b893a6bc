package nn

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// loss64 computes the loss of one row by the definition, and its gradient. Differences of
// large losses would be too coarse to tell the gradient.
func loss64(x []float64, target uint32) (loss float64, grad []float64) {
	most, sum := slices.Max(x), 0.0
	for _, v := range x {
		sum += math.Exp(v - most)
	}
	for _, v := range x {
		grad = append(grad, math.Exp(v-most)/sum)
	}
	grad[target]--
	return math.Log(sum) + most - x[target], grad
}

// lossOf places logits of a size, targets, and memory for losses.
func lossOf(t *rapid.T, y *yard, kind kernels.Number, x []float64, cols int) (Loss, []uint32) {
	targets := make([]uint32, len(x)/cols)
	for i := range targets {
		targets[i] = uint32(y.rng.IntN(cols))
		if rapid.IntRange(0, 4).Draw(t, "no target") == 0 {
			targets[i] = None
		}
	}
	logits := placeMatrix(y, kind, cols, x)
	return Loss{Logits: logits, Targets: put(y, targets), Losses: place[float32](y, len(targets)), Grad: logits, Scale: 0.25}, targets
}

func TestCrossEntropy(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, cols, kind := rapid.IntRange(1, 6).Draw(t, "rows"), rapid.IntRange(1, 80).Draw(t, "columns"), drawType(t, "type")
		size := rapid.SampledFrom([]float64{1, 10, 1000, 1e5}).Draw(t, "size")
		x := drawn(y, kind, rows*cols)
		for i := range x {
			x[i] = float64(stored(kind, float32(x[i]*size)))
		}
		l, targets := lossOf(t, y, kind, x, cols)
		grads := []Matrix{{}, l.Logits}
		if kind == kernels.F32 {
			grads = append(grads, l.Logits.Half())
		}
		l.Grad = rapid.SampledFrom(grads).Draw(t, "gradient")
		before := bytes.Clone(numbersAt[byte](l.Logits.Range))
		CrossEntropy(y, l)
		if l.Grad.Buf == nil && !bytes.Equal(before, numbersAt[byte](l.Logits.Range)) {
			t.Fatalf("logits were written without a gradient")
		}
		for i, target := range targets {
			row, loss := x[i*cols:(i+1)*cols], float64(numbersAt[float32](l.Losses)[i])
			want, grad := 0.0, make([]float64, cols)
			if target != None {
				want, grad = loss64(row, target)
			}
			if !within(loss, want, 1e-6*(1+math.Abs(want))) {
				t.Fatalf("the loss of row %d is %v, want %v", i, loss, want)
			}
			if l.Grad.Buf == nil {
				continue
			}
			for j, g := range grad {
				g *= float64(l.Scale)
				part := 1e-6
				if l.Grad.Type == kernels.BF16 {
					part += math.Abs(g) / 256
				}
				if got := float64(l.Grad.get(i, j)); !within(got, g, part) {
					t.Fatalf("the gradient of row %d at %d is %v, want %v", i, j, got, g)
				}
			}
		}
	})
}

// Losses have the same bits with and without gradients.
func TestLossWithoutGradients(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, cols, kind := rapid.IntRange(1, 6).Draw(t, "rows"), rapid.IntRange(1, 300).Draw(t, "columns"), drawType(t, "type")
		l, _ := lossOf(t, y, kind, drawn(y, kind, rows*cols), cols)
		with, without := l, l
		without.Grad, without.Losses = Matrix{}, place[float32](y, rows)
		CrossEntropy(y, without)
		CrossEntropy(y, with)
		if !bytes.Equal(numbersAt[byte](with.Losses), numbersAt[byte](without.Losses)) {
			t.Fatalf("losses differ: %v and %v", numbersAt[float32](with.Losses), numbersAt[float32](without.Losses))
		}
	})
}

// Logits that are infinite or NaN make the loss NaN, so whoever looks at the loss
// notices.
func TestLossOfBrokenLogits(t *testing.T) {
	y := newYard(t, 1<<14)
	for _, bad := range []float64{math.NaN(), math.Inf(1)} {
		y.reset(t)
		l := Loss{Logits: placeMatrix(y, kernels.F32, 3, []float64{1, bad, 2}), Targets: put(y, []uint32{0}), Losses: place[float32](y, 1), Scale: 1}
		CrossEntropy(y, l)
		if v := numbersAt[float32](l.Losses)[0]; v == v && !math.IsInf(float64(v), 0) {
			t.Errorf("with %v among the logits the loss is %v", bad, v)
		}
	}
	// Minus infinity marks a token that cannot occur.
	y.reset(t)
	l := Loss{Logits: placeMatrix(y, kernels.F32, 3, []float64{1, math.Inf(-1), 1}), Targets: put(y, []uint32{0}), Losses: place[float32](y, 1), Scale: 1}
	l.Grad = l.Logits
	CrossEntropy(y, l)
	if v := numbersAt[float32](l.Losses)[0]; !within(float64(v), math.Ln2, 1e-6) || l.Logits.get(0, 1) != 0 {
		t.Errorf("the loss among two is %v", v)
	}
}

func TestAddUp(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		x := drawn(y, kernels.F32, rapid.IntRange(1, 500).Draw(t, "n"))
		sum := put(y, []float32{3})
		AddUp(y, Total{Sum: sum, X: solid(y, kernels.F32, len(x), x).Range, Factor: 0.5})
		want := 3.0
		for _, v := range x {
			want += 0.5 * v
		}
		if got := numbersAt[float32](sum)[0]; !within(float64(got), want, 1e-4) {
			t.Fatalf("the total is %v, want %v", got, want)
		}
	})
}

func TestLossRefuses(t *testing.T) {
	y := newYard(t, 1<<14)
	targets := put(y, []uint32{0, 5})
	for name, f := range map[string]func(){
		"a target that is none": func() {
			CrossEntropy(y, Loss{Logits: y.matrix(kernels.F32, 2, 5), Targets: targets, Losses: place[float32](y, 2)})
		},
		"a total of bytes": func() { AddUp(y, Total{Sum: place[float32](y, 1), X: device.Range{}}) },
	} {
		wantPanic(t, name, f)
	}
}
