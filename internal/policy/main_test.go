// This file owns what surrounds the tests: no goroutine and no open file may be left behind.

package policy

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
