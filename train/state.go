// This file owns what of a run is kept on disk: names of tensors, saving and resuming.

package train

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/train/layer"
)

// piece is a part of a parameter that has a name of its own on disk: the whole of it,
// or one expert's matrix.
type piece struct {
	name       string
	from, n    int
	rows, cols int
}

// pieces are those of a parameter. Experts are named by their number in the layer, so
// that a checkpoint does not depend on how they were divided.
func pieces(p layer.Param) []piece {
	if !p.Expert {
		return []piece{{p.Name, 0, p.Elements(), p.Rows, p.Cols}}
	}
	out := make([]piece, p.Count)
	n, rows := p.Elements()/p.Count, p.Rows/p.Count
	for i := range out {
		name := strings.Replace(p.Name, "experts.", fmt.Sprintf("experts.%d.", p.First+i), 1)
		out[i] = piece{name, i * n, n, rows, p.Cols}
	}
	return out
}
