// This file owns the kinds of trials of what Mamba layers are made of.

package nn

import (
	"github.com/stowage-dev/stowage/device"
)

// scan is one of a few chunks.
func (x *trial) scan() Scan {
	c := Scan{Seq: 1 + x.IntN(200), HeadDim: 1 + x.IntN(40), Groups: 1 + x.IntN(2), State: 1 + x.IntN(40)}
	if x.IntN(3) == 0 {
		c.Seq, c.HeadDim, c.State = 64+x.IntN(80), 1+x.IntN(80), 1+x.IntN(140)
	}
	c.Heads = c.Groups * x.upto(3, 10)
	rows := c.Seq * x.upto(2, 4)
	t, params := x.number(), x.number()
	c.XBC, c.DT = x.matrix(t, rows, c.inner()+2*c.Groups*c.State), x.matrix(t, rows, c.Heads)
	c.ALog, c.D, c.DTBias = x.matrix(params, 1, c.Heads), x.matrix(params, 1, c.Heads), x.matrix(params, 1, c.Heads)
	if n := c.StateBytes(rows); n > 0 {
		c.States = x.numbers(0, int(n/4), 1)
	}
	return c
}

func scanTrial(x *trial) func(s device.Stream) {
	c := x.scan()
	c.Y = x.matrix(c.XBC.Type, c.XBC.Rows, c.inner())
	return func(s device.Stream) { Recur(s, c) }
}

func scanGradTrial(x *trial) func(s device.Stream) {
	c := ScanGrad{Scan: x.scan()}
	rows, t, grads := c.XBC.Rows, c.XBC.Type, x.number()
	c.DY, c.DXBC, c.DDT = x.matrix(t, rows, c.inner()), x.over(c.XBC, t), x.matrix(t, rows, c.Heads)
	c.DALog, c.DD, c.DDTBias = x.matrix(grads, 1, c.Heads), x.matrix(grads, 1, c.Heads), x.matrix(grads, 1, c.Heads)
	c.Scratch = x.waste(c.ScratchBytes(rows), scratch)
	return func(s device.Stream) { RecurGrad(s, c) }
}
