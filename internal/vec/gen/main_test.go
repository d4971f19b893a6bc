package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// What is committed is what the generator makes.
func TestOutputIsCurrent(t *testing.T) {
	for name, want := range generate() {
		got, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what the generator makes; run go generate ./internal/vec", name)
		}
	}
}
