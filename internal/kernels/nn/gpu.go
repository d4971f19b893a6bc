// This file owns the images of the kernels' device code. The source x.cu lies beside x.go,
// which documents it.

package nn

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
)

//go:generate go run ../../ptx/ptxgen

var (
	//go:embed act_sm80.ptx
	actPTX string
	//go:embed embed_sm80.ptx
	embedPTX string
	//go:embed loss_sm80.ptx
	lossPTX string
	//go:embed norm_sm80.ptx
	normPTX string
	//go:embed optim_sm80.ptx
	optimPTX string
	//go:embed rope_sm80.ptx
	ropePTX string
	//go:embed route_sm80.ptx
	routePTX string
	//go:embed rows_sm80.ptx
	rowsPTX string
	//go:embed scan_sm80.ptx
	scanPTX string
	//go:embed scangrad_sm80.ptx
	scanGradPTX string
	//go:embed scantensor_sm80.ptx
	scanTensorPTX string
	//go:embed scangradtensor_sm80.ptx
	scanGradTensorPTX string
	//go:embed conv_sm80.ptx
	convPTX string
	//go:embed gatednorm_sm80.ptx
	gatedNormPTX string

	actImage       = image("nn/act.cu", actPTX)
	embedImage     = image("nn/embed.cu", embedPTX)
	lossImage      = image("nn/loss.cu", lossPTX)
	normImage      = image("nn/norm.cu", normPTX)
	optimImage     = image("nn/optim.cu", optimPTX)
	ropeImage      = image("nn/rope.cu", ropePTX)
	routeImage     = image("nn/route.cu", routePTX)
	rowsImage      = image("nn/rows.cu", rowsPTX)
	convImage      = image("nn/conv.cu", convPTX)
	gatedNormImage = image("nn/gatednorm.cu", gatedNormPTX)
	scanImage      = image("nn/scan.cu", scanPTX)
	scanGradImage  = image("nn/scangrad.cu", scanGradPTX)

	scanTensorImage     = image("nn/scantensor.cu", scanTensorPTX)
	scanGradTensorImage = image("nn/scangradtensor.cu", scanGradTensorPTX)
)

// image returns the image of a source with its portable variant, which runs on every GPU
// since Ampere.
func image(source, sm80 string) *device.Image {
	return &device.Image{Name: source, Variants: []device.Variant{{Major: 8, Minor: 0, PTX: sm80}}}
}
