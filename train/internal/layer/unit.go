// This file owns parameters: their units, their places during a pass, and their initial
// values.

package layer

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/plan/model"
)

// Param is a parameter as one rank has it.
type Param struct {
	// Name is the name in the whole model, such as "layers.3.mlp.router.weight".
	Name string
	// Rows and Cols are those of all its matrices, one below the other. An expert weight is
	// Count matrices, of which this rank has those from First on.
	Rows, Cols   int
	Count, First int
	Expert       bool
	// Type is the format that passes read.
	Type kernels.Number
	// NoDecay excludes the parameter from weight decay. It is set for vectors.
	NoDecay bool
	init    initial
}

// Elements returns how many numbers this rank has.
func (p Param) Elements() int { return p.Rows * p.Cols }

// initial says which values a parameter begins with.
type initial uint8

const (
	normal initial = iota // with the deviation below
	scaled                // smaller with the number of layers: for what adds to the residual stream
	ones
	zeros
	decays // A_log of a scan: log of 1 to 16
	steps  // dt_bias of a scan: the inverse softplus of 0.001 to 0.1
	taps   // of a convolution: uniform in plus and minus 1/sqrt(taps)
)

const deviation = 0.02

// Unit is parameters that are used together. A store says where they are while a pass runs.
type Unit struct {
	Name   string
	Params []Param
	// Loose marks a unit that is used inside and between others: an embedding that is also
	// the output layer.
	Loose bool
	// Once says that every pass that makes gradients writes those of each matrix once, by a
	// product. The first pass of a step then stores them, and finds no zeros.
	Once bool
	Grad kernels.Number // the format of gradients
	// Fresh is set by the store before a pass: no pass of this step has made gradients of
	// the unit, and those that are stored are not zero.
	Fresh bool

	only           string // index finds only parameters whose names contain it
	weights, grads func(i int) device.Range
}

// Bind sets where parameters and gradients are. Either may be nil.
func (u *Unit) Bind(weights, grads func(i int) device.Range) { u.weights, u.grads = weights, grads }

// Stores reports whether the first pass of a step stores the gradient of parameter i.
func (u *Unit) Stores(i int) bool { return u.Once && !u.Params[i].NoDecay }

// index returns the parameter whose name ends with suffix.
func (u *Unit) index(suffix string) int {
	for i, p := range u.Params {
		if strings.HasSuffix(p.Name, suffix) && strings.Contains(p.Name, u.only) {
			return i
		}
	}
	panic(fmt.Sprintf("layer: unit %s has no parameter %s", u.Name, suffix))
}

// weight is a parameter of a unit, for the layer that uses it.
type weight struct {
	u *Unit
	i int
}

func (u *Unit) weight(suffix string) weight { return weight{u, u.index(suffix)} }

// w returns the parameter.
func (w weight) w() nn.Matrix {
	p := w.u.Params[w.i]
	return nn.NewMatrix(w.u.weights(w.i), p.Type, p.Rows, p.Cols)
}

func (w weight) dw() nn.Matrix {
	p := w.u.Params[w.i]
	return nn.NewMatrix(w.u.grads(w.i), w.u.Grad, p.Rows, p.Cols)
}

// first reports whether this pass stores the gradient, instead of adding to it.
func (w weight) first() bool { return w.u.Fresh && w.u.Stores(w.i) }

// row returns a vector as a matrix of one row.
func row(m nn.Matrix) nn.Matrix {
	m.Rows, m.Cols, m.Pitch = 1, m.Rows*m.Cols, 0
	return m
}

// Place says which part of a model's experts a rank has.
type Place struct{ Rank, Ranks int }

// newUnit returns a unit of a model's parameters.
func newUnit(name, prefix string, params []model.Param, number, grad kernels.Number, ep Place) *Unit {
	u := &Unit{Name: name, Grad: grad}
	for _, q := range params {
		p := Param{Name: prefix + q.Name, Rows: q.Rows, Cols: q.Cols, Count: 1, Type: number, NoDecay: q.Cols == 1}
		if q.Split == model.Expert {
			p.Expert, p.Count = true, q.Count/ep.Ranks
			p.First = ep.Rank * p.Count
			p.Rows *= p.Count
			p.NoDecay = false
		}
		p.begin(q.Name)
		u.Params = append(u.Params, p)
	}
	return u
}

// begin sets the initial values of a parameter by its name.
func (p *Param) begin(name string) {
	end := func(s ...string) bool {
		for _, x := range s {
			if strings.HasSuffix(name, x) {
				return true
			}
		}
		return false
	}
	switch {
	case end("A_log"):
		p.init, p.Type = decays, kernels.F32
	case end("dt_bias"):
		p.init, p.Type = steps, kernels.F32
	case end("mixer.D"):
		p.init, p.Type = ones, kernels.F32
	case end("conv1d.weight"):
		p.init, p.NoDecay = taps, true
	case end("norm.weight"):
		p.init = ones
	case end(".bias"):
		p.init = zeros
	case end("linear_proj.weight", "linear_fc2.weight", "out_proj.weight"):
		p.init = scaled
	}
}

// Values returns the initial values of the rank's part of a parameter. They depend only on
// the seed and the name, so every layout of ranks begins with the same. layers is the
// number of the model's layers.
func (p Param) Values(seed uint64, layers int) []float32 {
	out := make([]float32, p.Elements())
	each := len(out) / p.Count
	for k := range p.Count {
		part := out[k*each : (k+1)*each]
		parallel.For(each, valuesRun, func(from, to int) {
			h := fnv.New64a()
			fmt.Fprintf(h, "%s/%d/%d", p.Name, p.First+k, from)
			p.fill(part[from:to], rand.New(rand.NewPCG(seed, h.Sum64())), layers)
		})
	}
	return out
}

// valuesRun is how many numbers one generator makes. It is small enough to give all threads
// work. Changing it changes what a seed means.
const valuesRun = 1 << 16

func (p Param) fill(out []float32, r *rand.Rand, layers int) {
	for i := range out {
		switch p.init {
		case normal:
			out[i] = float32(deviation * r.NormFloat64())
		case scaled:
			out[i] = float32(deviation / math.Sqrt(2*float64(max(layers, 1))) * r.NormFloat64())
		case ones:
			out[i] = 1
		case decays:
			out[i] = float32(math.Log(1 + 15*r.Float64()))
		case steps:
			dt := math.Exp(math.Log(1e-3) + r.Float64()*math.Log(100))
			out[i] = float32(dt + math.Log(-math.Expm1(-dt)))
		case taps:
			out[i] = float32((2*r.Float64() - 1) / math.Sqrt(float64(p.Cols)))
		}
	}
}
