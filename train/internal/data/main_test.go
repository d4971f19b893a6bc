// This file checks that the tests leave no goroutines and no open files behind.

package data

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/leak"
)

func TestMain(m *testing.M) { leak.MainWithoutCollector(m) }
