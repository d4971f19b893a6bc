// This file owns the measurement of dense products: the rate of arithmetic that a device
// reaches, to which `stowage train --profile` compares kernels.

package bench

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// ProductSize returns the size of the square matrices that a device is measured with: large
// enough for its full rate, and small enough for some milliseconds.
func ProductSize(d device.Device) int {
	if d.Info().Backend == "cpu" {
		return 512
	}
	return 8192
}

// Product returns the rate of a product of two square matrices of random numbers in
// TFLOP/s: that of the fastest of some runs, because other work only makes runs slower.
func Product(d device.Device, number kernels.Number, size int) (rate float64, err error) {
	bytes := number.Size() * memory.Bytes(size*size)
	buf, err := d.Alloc(memory.Device, 3*bytes, "bench")
	if err != nil {
		return 0, err
	}
	s, err := d.NewStream("bench")
	if err != nil {
		return 0, err
	}
	defer func() { s.Free(buf); err = errors.Join(err, s.Close()) }()
	begin, err := d.NewEvent(device.Timing)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, begin.Close()) }()
	end, err := d.NewEvent(device.Timing)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, end.Close()) }()
	fillNormal(s, buf.All(), number)
	at := func(i int) nn.Matrix {
		return nn.NewMatrix(buf.Slice(memory.Bytes(i)*bytes, bytes), number, size, size)
	}
	best := time.Duration(math.MaxInt64)
	for range 6 {
		s.Record(begin)
		nn.Gemm(s, nn.Product{A: at(0), B: at(1), C: at(2), TransB: true})
		s.Record(end)
		if err := s.Sync(); err != nil {
			return 0, err
		}
		took, err := end.Since(begin)
		if err != nil {
			return 0, err
		}
		best = min(best, max(took, 1))
	}
	return teraflops(size, best), nil
}

// teraflops returns the rate of a product of square matrices, of whose multiply-adds each counts as two.
func teraflops(size int, took time.Duration) float64 {
	n := float64(size)
	return 2 * n * n * n / took.Seconds() / 1e12
}

// fillNormal fills a range with normal numbers, the same ones again and again: products of
// zeros need less power and are faster.
func fillNormal(s device.Stream, r device.Range, number kernels.Number) {
	rng := rand.New(rand.NewPCG(1, 2))
	tile := make([]byte, 0, min(r.Len, 1<<20))
	for len(tile) < cap(tile) {
		v := math.Float32bits(float32(rng.NormFloat64()))
		if number == kernels.BF16 {
			tile = binary.LittleEndian.AppendUint16(tile, uint16(v>>16))
		} else {
			tile = binary.LittleEndian.AppendUint32(tile, v)
		}
	}
	s.Upload(r.Slice(0, memory.Bytes(len(tile))), tile)
	for n := memory.Bytes(len(tile)); n < r.Len; n *= 2 {
		part := min(n, r.Len-n)
		s.Copy(r.Slice(n, part), r.Slice(0, part))
	}
}
