// This file sees to it that no goroutine outlives the tests.

package cuda

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
