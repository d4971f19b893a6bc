// Command ptxgen brings the PTX of the folders it is given up to date with the
// kernel sources in them. Go generate runs it.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/stowage-dev/stowage/internal/ptx"
)

func main() {
	dirs := os.Args[1:]
	if len(dirs) == 0 {
		dirs = []string{"."}
	}
	if err := generate(dirs); err != nil {
		fmt.Fprintln(os.Stderr, "ptxgen:", err)
		os.Exit(1)
	}
}

func generate(dirs []string) error {
	c, err := ptx.Find()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		changed, err := c.Generate(dir)
		for _, name := range changed {
			fmt.Println("ptxgen: changed", filepath.Join(dir, name))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
