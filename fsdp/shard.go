// This file owns what a rank keeps of the model for good: its shards of the
// weights, the parameters and the gradients, and how values get in and out of
// them between steps.

package fsdp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
)

// Shard is one rank's part of a bucket. An optimiser reads Grads and updates
// Weights, element by element, on the stream that ended the step; Cast then
// makes Params of Weights.
type Shard struct {
	Unit, Bucket int
	Weights      device.Range // fp32
	Params       device.Range // in the parameters' type; where that is fp32, Weights
	Grads        device.Range // in the type Config.MainGrads
	Pieces       []Piece
}

// shards is the memory of a rank's shards: for each kind one buffer, in which
// buckets have the same order, those whose parameters are fp32 last.
type shards struct {
	weights, params, grads *device.Buffer
	wide                   *device.Buffer // main gradients made fp32 to be added to, or nil
	of                     [][]Shard      // by unit and bucket
	all                    []Shard
}

// take allocates a rank's memory.
func (s *shards) take(dev device.Device, l *layout, cfg *Config) error {
	type part struct {
		buf      **device.Buffer
		name     string
		elements int64
		size     int64
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
		n := device.Bytes(m.elements * m.size)
		if n == 0 { // all parameters are fp32
			continue
		}
		buf, err := dev.Alloc(device.Accel, n, cfg.owner("shard of "+m.name))
		if err != nil {
			return fmt.Errorf("fsdp: rank %d: its shard of the %s takes %v; shard over more ranks: %w", cfg.Rank, m.name, n, err)
		}
		*m.buf = buf
	}
	s.divide(l, cfg)
	return nil
}

// divide cuts the memory into shards.
func (s *shards) divide(l *layout, cfg *Config) {
	part := func(buf *device.Buffer, b block, size int64) device.Range {
		return buf.Slice(device.Bytes(b.at*size), device.Bytes(b.shard*size))
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

// zero makes all of it zero: the padding stays so for ever.
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

// add adds a reduced gradient to a main gradient: in fp32, rounded once.
func (s *shards) add(on device.Stream, main, part device.Range, cfg *Config) {
	to, from := number(cfg.MainGrads), number(cfg.GradComm)
	r := kernels.Reduction{To: to, From: from, Dst: main, Acc: main}
	switch {
	case to == kernels.F32:
	case to == from: // the kernel adds only to fp32, but sources may be two
		r.Acc = device.Range{}
		kernels.Reduce(on, r, main, part)
		return
	default:
		r.Acc = s.wide.Slice(0, part.Len)
		kernels.Convert(on, r.Acc, kernels.F32, main, to)
	}
	kernels.Reduce(on, r, part)
}

// Shards are this rank's parts of all buckets, in the order of units.
func (p *Pipeline) Shards() []Shard { return p.shards.all }

// Cast makes the parameters that the next step gathers of the main weights. It
// belongs between two steps, behind the optimiser on its stream, and may be
// captured.
func (p *Pipeline) Cast(s device.Stream) {
	if n := p.layout.narrow; n > 0 {
		kernels.Convert(s, p.shards.params.All(), kernels.BF16, p.shards.weights.Slice(0, device.Bytes(n*FP32.Size)), kernels.F32)
	}
}

// Load gives a parameter its values, on this rank as far as they lie in its
// shard. It waits for the device, and belongs between steps.
func (p *Pipeline) Load(unit, param int, values []float32) error {
	p.between("Load")
	of := p.layout.units[unit].Params[param]
	if int64(len(values)) != of.Elements() {
		return fmt.Errorf("fsdp: rank %d: %d values for parameter %q of unit %q, which has %d elements",
			p.cfg.Rank, len(values), of.Name, p.layout.units[unit].Name, of.Elements())
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
		s.Upload(x.Weights.Slice(device.Bytes(4*piece.At), device.Bytes(len(raw))), raw)
	}
	if x.Params != x.Weights {
		kernels.Convert(s, x.Params, kernels.BF16, x.Weights, kernels.F32)
	}
	return s.Sync()
}

// Copy is one of the copies that a rank keeps of a parameter.
type Copy uint8

const (
	Weights Copy = iota // fp32
	Params              // in the parameter's type
	Grads               // in the type Config.MainGrads
)

// Read collects a whole parameter. All ranks of its group call it, in the same
// order. It waits for the device, and belongs between steps.
func (p *Pipeline) Read(unit, param int, which Copy) ([]float32, error) {
	p.between("Read")
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

// collect gathers the shards of a bucket in the host's memory, as many bytes at a
// time as its parameters take, for which the pool, idle between steps, has room
// unless their memory is dynamic. All ranks must divide alike.
func (p *Pipeline) collect(src device.Range, b block, g Group) (raw []byte, err error) {
	n, most := device.Bytes(g.Comm.Size()), device.Bytes(b.shard*b.Type.Size)
	stage, s := p.params.buf, p.in.Stream
	if stage == nil || stage.Size() < n*most {
		if stage, err = p.dev.Alloc(device.Accel, n*most, p.cfg.owner("parameters read")); err != nil {
			return nil, err
		}
		defer s.Free(stage)
	}
	raw = make([]byte, n*src.Len)
	for from := device.Bytes(0); from < src.Len; from += most {
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

// decode is an element of a run of numbers.
func decode(raw []byte, i int64, t bucket.Type) float32 {
	if t == BF16 {
		return math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw[2*i:])) << 16)
	}
	return math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
}
