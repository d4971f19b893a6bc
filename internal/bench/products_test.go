package bench

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// A product has a rate in both formats, and leaves nothing on the device.
func TestProduct(t *testing.T) {
	var d device.Device
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, number := range []kernels.Number{kernels.F32, kernels.BF16} {
		if rate, err := Product(d, number, 48); err != nil || rate <= 0 {
			t.Error(rate, err)
		}
	}
	if ProductSize(d) < 48 {
		t.Error("too small to be a limit")
	}
	if err := d.Close(); err != nil { // which complains about memory that was not freed
		t.Error(err)
	}
}

// All numbers that are multiplied are normal ones, up to the last: products of zeros are faster.
func TestFillNormal(t *testing.T) {
	d := open(t, 8*memory.MiB)
	s, err := d.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	for _, number := range []kernels.Number{kernels.F32, kernels.BF16} {
		for _, n := range []memory.Bytes{64, memory.MiB, 5 * memory.MiB / 2, 4*memory.MiB + 8} {
			b, err := d.Alloc(memory.Device, n, "test")
			if err != nil {
				t.Fatal(err)
			}
			s.Fill(b.All(), 0)
			fillNormal(s, b.All(), number)
			got := make([]byte, n)
			if err := s.Download(got, b.All()); err != nil {
				t.Fatal(err)
			}
			sum, squares, zeros := 0.0, 0.0, 0
			for i := 0; i < len(got); i += int(number.Size()) {
				bits := uint32(binary.LittleEndian.Uint16(got[i:])) << 16
				if number == kernels.F32 {
					bits = binary.LittleEndian.Uint32(got[i:])
				}
				v := float64(math.Float32frombits(bits))
				sum, squares = sum+v, squares+v*v
				if v == 0 {
					zeros++
				}
			}
			count := float64(n / number.Size())
			if zeros > 0 || n > 64 && (math.Abs(sum/count) > 0.02 || math.Abs(squares/count-1) > 0.02) {
				t.Errorf("%v of %v: %d zeros, a mean of %v and a variance of %v", number, n, zeros, sum/count, squares/count)
			}
			s.Free(b)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
