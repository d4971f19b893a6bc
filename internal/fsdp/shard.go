// This file owns what a rank keeps of the model between steps: its shards of the main
// weights, parameters and main gradients, and how to load and read their values.

package fsdp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Shard is one rank's part of a bucket. The optimiser reads Grads and updates Weights,
// element by element, on the stream of the step. Cast then computes Params from Weights.
type Shard struct {
	Unit, Bucket int
	Weights      device.Range // fp32
	Params       device.Range // in the parameters' type; the same memory as Weights if that is fp32
	Grads        device.Range // in the type Config.MainGrads
	Pieces       []Piece
}

// shards holds the memory of a rank's shards: one buffer each for weights, parameters
// and gradients. Buckets have the same order in all of them, with fp32 parameters last.
type shards struct {
	weights, params, grads *device.Buffer
	wide                   *device.Buffer // scratch: a main gradient converted to fp32 to be added to, or nil
	of                     [][]Shard      // by unit and bucket
	all                    []Shard
}

// allocate allocates the shards of a rank.
func (s *shards) allocate(dev device.Device, l *layout, cfg *Config) error {
	type part struct {
		buf      **device.Buffer
		name     string
		elements int64
		size     memory.Bytes // of one element
	}
	parts := []part{
		{&s.weights, "main weights", l.elements, FP32.Size},
		{&s.params, "parameters", l.narrow, BF16.Size},
		{&s.grads, "main gradients", l.elements, cfg.MainGrads.Size},
	}
	if cfg.MainGrads.Size < cfg.GradComm.Size {
		parts = append(parts, part{&s.wide, "gradients being added up", l.largest, FP32.Size})
	}
	for _, m := range parts {
		n := memory.Bytes(m.elements) * m.size
		if n == 0 { // all parameters are fp32
			continue
		}
		buf, err := dev.Alloc(memory.Device, n, cfg.owner("shard of "+m.name))
		if err != nil {
			return fmt.Errorf("fsdp: rank %d: the shard of the %s needs %v; shard over more ranks: %w", cfg.Rank, m.name, n, err)
		}
		*m.buf = buf
	}
	s.divide(l, cfg)
	return nil
}

// divide cuts the memory into shards.
func (s *shards) divide(l *layout, cfg *Config) {
	part := func(buf *device.Buffer, b block, size memory.Bytes) device.Range {
		return buf.Slice(memory.Bytes(b.at)*size, memory.Bytes(b.shard)*size)
	}
	for u, blocks := range l.blocks {
		var of []Shard
		for i, b := range blocks {
			x := Shard{
				Unit: u, Bucket: i, Pieces: l.pieces(u, i, cfg.Groups[b.group].Comm.Rank()),
				Weights: part(s.weights, b, FP32.Size), Grads: part(s.grads, b, cfg.MainGrads.Size),
			}
			if x.Params = x.Weights; b.Type != FP32 {
				x.Params = part(s.params, b, b.Type.Size)
			}
			of = append(of, x)
		}
		s.of, s.all = append(s.of, of), append(s.all, of...)
	}
}

// zero fills all shards with zeros. Padding stays zero for ever.
func (s *shards) zero(on device.Stream) {
	for _, b := range []*device.Buffer{s.weights, s.params, s.grads} {
		if b != nil {
			on.Fill(b.All(), 0)
		}
	}
}

func (s *shards) free(on device.Stream) {
	for _, b := range []*device.Buffer{s.weights, s.params, s.grads, s.wide} {
		if b != nil {
			on.Free(b)
		}
	}
}

// add adds a reduced gradient to a main gradient. It adds in fp32 and rounds once.
func (s *shards) add(on device.Stream, main, part device.Range, cfg *Config) {
	to, from := kernelType(cfg.MainGrads), kernelType(cfg.GradComm)
	r := kernels.Reduction{To: to, From: from, Dst: main, Acc: main}
	switch {
	case to == kernels.F32:
	case to == from: // the kernel accumulates only in fp32, so the main gradient is a source
		r.Acc = device.Range{}
		kernels.Reduce(on, r, main, part)
		return
	default:
		r.Acc = s.wide.Slice(0, part.Len)
		kernels.Convert(on, r.Acc, kernels.F32, main, to)
	}
	kernels.Reduce(on, r, part)
}

// Shards returns this rank's parts of all buckets, in the order of units.
func (p *Pipeline) Shards() []Shard { return p.shards.all }

// Cast computes the parameters that the next step gathers from the main weights. Call
// it between two steps, after the optimiser on the same stream. It may be captured.
func (p *Pipeline) Cast(s device.Stream) {
	if n := p.layout.narrow; n > 0 {
		kernels.Convert(s, p.shards.params.All(), kernels.BF16, p.shards.weights.Slice(0, memory.Bytes(n)*FP32.Size), kernels.F32)
	}
}

// Load sets the values of a parameter, as far as they lie in this rank's shard. It waits
// for the device. It returns an error if the number of values is wrong, and panics
// inside a step.
func (p *Pipeline) Load(unit, param int, values []float32) error {
	p.mustBeBetweenSteps("Load")
	of := p.layout.units[unit].Params[param]
	if int64(len(values)) != of.Elements() {
		return fmt.Errorf("fsdp: rank %d: expected %d values for parameter %q of FSDP unit %q, got %d",
			p.cfg.Rank, of.Elements(), of.Name, p.layout.units[unit].Name, len(values))
	}
	if err := p.lanes.Sync(); err != nil {
		return err
	}
	s, x := p.in.Stream, p.shards.of[unit][p.layout.spots[unit][param].block]
	for _, piece := range x.Pieces {
		if piece.Param != param {
			continue
		}
		raw := make([]byte, 0, 4*piece.Elements)
		for _, v := range values[piece.From : piece.From+piece.Elements] {
			raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
		}
		s.Upload(x.Weights.Slice(memory.Bytes(4*piece.At), memory.Bytes(len(raw))), raw)
	}
	if x.Params != x.Weights {
		kernels.Convert(s, x.Params, kernels.BF16, x.Weights, kernels.F32)
	}
	return s.Sync()
}

// Copy names one of the copies that a rank keeps of a parameter.
type Copy uint8

const (
	Weights Copy = iota // fp32
	Params              // in the parameter's type
	Grads               // in the type Config.MainGrads
)

// Read gathers a whole parameter and returns its values. All ranks of its group must
// call it, in the same order. It waits for the device and panics inside a step.
func (p *Pipeline) Read(unit, param int, which Copy) ([]float32, error) {
	p.mustBeBetweenSteps("Read")
	if err := p.lanes.Sync(); err != nil {
		return nil, err
	}
	at := p.layout.spots[unit][param]
	x, b := p.shards.of[unit][at.block], p.layout.blocks[unit][at.block]
	src, typ := x.Weights, FP32
	switch which {
	case Params:
		src, typ = x.Params, b.Type
	case Grads:
		src, typ = x.Grads, p.cfg.MainGrads
	}
	raw, err := p.collect(src, b, p.cfg.Groups[b.group])
	if err != nil {
		return nil, err
	}
	values := make([]float32, p.layout.units[unit].Params[param].Elements())
	for i := range values {
		values[i] = decode(raw, at.first+int64(i), typ)
	}
	return values, nil
}

// collect gathers the shards of a bucket into host memory. It gathers at most as many
// bytes at a time as the bucket's parameters need: the pool, which is idle between
// steps, has room for them unless its memory is dynamic. All ranks divide alike.
func (p *Pipeline) collect(src device.Range, b block, g RankGroup) (raw []byte, err error) {
	n, most := memory.Bytes(g.Comm.Size()), memory.Bytes(b.shard)*b.Type.Size
	stage, s := p.params.buf, p.in.Stream
	if stage == nil || stage.Size() < n*most {
		if stage, err = p.dev.Alloc(memory.Device, n*most, p.cfg.owner("parameters read")); err != nil {
			return nil, err
		}
		defer s.Free(stage)
	}
	raw = make([]byte, n*src.Len)
	for from := memory.Bytes(0); from < src.Len; from += most {
		size := min(most, src.Len-from)
		part := make([]byte, n*size)
		dst := stage.Slice(0, n*size)
		g.Comm.AllGather(s, dst, src.Slice(from, size))
		if err := errors.Join(s.Download(part, dst), g.Comm.Err()); err != nil {
			return nil, err
		}
		for r := range n {
			copy(raw[r*src.Len+from:], part[r*size:(r+1)*size])
		}
	}
	return raw, nil
}

// decode returns element i as fp32.
func decode(raw []byte, i int64, t bucket.Type) float32 {
	if t == BF16 {
		return math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw[2*i:])) << 16)
	}
	return math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
}
