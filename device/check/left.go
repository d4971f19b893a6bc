// This file owns the search for what a program left open. Memory that was never freed is
// found by the device's own Close.

package check

import (
	"fmt"
	"slices"
	"strings"
)

// Left returns an error with the streams, events and graphs that are still open, and
// where they were made. Streams end with the device. Tests of other packages find the method by its name.
func (d *dev) Left() error {
	d.c.mu.Lock()
	defer d.c.mu.Unlock()
	var lines []string
	for x, site := range d.open {
		what := "a graph"
		switch x := x.(type) {
		case *stream:
			what = fmt.Sprintf("stream %q", x.name)
		case *event:
			what = "an event"
		}
		lines = append(lines, what+" made at "+site.String())
	}
	if len(lines) == 0 {
		return nil
	}
	slices.Sort(lines)
	return fmt.Errorf("left open:\n  %s", strings.Join(lines, "\n  "))
}
