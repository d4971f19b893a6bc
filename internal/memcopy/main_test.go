// This file owns the last word on the tests: parallel copies start goroutines,
// and none may outlive its copy.

package memcopy

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
