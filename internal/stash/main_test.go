// This file owns what surrounds the tests: no goroutine may be left behind.

package stash

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
