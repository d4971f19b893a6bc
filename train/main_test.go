// This file owns what surrounds the tests: no goroutine may be left behind.

package train

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
