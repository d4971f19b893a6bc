package bench

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
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
