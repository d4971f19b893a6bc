// This file checks that no test leaves a goroutine behind.

package web

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
