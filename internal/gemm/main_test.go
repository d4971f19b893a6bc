// This file owns the end of the tests: no goroutine is left.

package gemm

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
