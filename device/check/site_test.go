package check

import (
	"runtime"
	"testing"
)

// Frames of the packages that only pass work on are skipped; their tests are not.
func TestPassesOn(t *testing.T) {
	for function, want := range map[string]bool{
		"device.CheckAccess":            true,
		"device/cpu.(*stream).Copy":     true,
		"device/devicetest.testCopy":    false,
		"internal/devicekit.CheckCopy":  true,
		"internal/kernels.Copy":         true,
		"internal/kernels/nn.Gemm":      true,
		"internal/kernelsx.Copy":        false,
		"internal/offload.(*Manager).x": false,
	} {
		if got := passesOn(runtime.Frame{Function: module + function, File: "x.go"}); got != want {
			t.Errorf("%s passes on: %v, want %v", function, got, want)
		}
		if passesOn(runtime.Frame{Function: module + function, File: "x_test.go"}) {
			t.Errorf("a test of %s passes on", function)
		}
	}
}
