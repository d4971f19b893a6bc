// This file owns what kernels for Hopper share: their images, and tensor maps of matrices.

package nn

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// hopperImage returns the image of a source for Hopper alone.
func hopperImage(source, sm90a string) *device.Image {
	return &device.Image{Name: source, Variants: []device.Variant{{Major: 9, Minor: 0, Exact: true, PTX: sm90a}}}
}

// boxable reports whether boxes of the matrix can be copied by the copying unit.
func (m Matrix) boxable() bool {
	return m.Type == kernels.BF16 && m.Addr()%16 == 0 && m.pitch()%8 == 0
}

// boxes describes the matrix to the copying unit.
func (m Matrix) boxes(rows int) device.TensorMap {
	return device.TensorMap{Addr: m.Addr(), Rows: uint32(m.Rows), Cols: uint32(m.Cols), Pitch: uint32(m.pitch()), BoxRows: uint32(rows)}
}
