// This file owns the launches of the embedding. embedtwin.go has the twins.

package nn

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var (
	embedKernel     = device.Kernel{Name: "stowage_nn_embed", Image: embedImage, Go: embedTwin}
	embedSortKernel = device.Kernel{Name: "stowage_nn_embed_sort", Image: embedImage, Go: embedSortTwin}
	embedGradKernel = device.Kernel{Name: "stowage_nn_embed_grad", Image: embedImage, Go: embedGradTwin}
)

// Lookup copies rows of a table: row i of Y becomes row IDs[i] (uint32) of Table.
type Lookup struct {
	Y, Table Matrix
	IDs      device.Range
}

// Embed issues a lookup.
func Embed(s device.Stream, l Lookup) { s.Launch(embedLaunch(l)) }

// embedLaunch returns the launch of a lookup. Its arguments:
//
//	0..2  Y, Table, IDs
//	3     Y.Rows | Y.Cols << 32
//	4     pitch of Y | pitch of Table << 32
//	5     Table.Rows
//	6     types: bit 0 Y, 1 Table; set for bf16
func embedLaunch(e Lookup) device.Launch {
	e.Table.shape("a table of embeddings", e.Table.Rows, e.Y.Cols)
	l := device.NewLaunch(&embedKernel, e.Y.Rows, rowThreads)
	passMatrix(&l, "what a lookup writes", e.Y, device.Write)
	passMatrix(&l, "a table of embeddings", e.Table, device.Read)
	passRun(&l, "the numbers of a lookup", e.IDs, e.Y.Rows, 4, device.Read, false)
	l.Arg(packPair(e.Y.Rows, e.Y.Cols))
	l.Arg(packPair(e.Y.pitch(), e.Table.pitch()))
	l.Arg(uint64(e.Table.Rows))
	l.Arg(typeBits(e.Y, e.Table))
	return l
}

// LookupGrad is the backward pass of Lookup. It adds row i of DY to row IDs[i] of DTable,
// in the order of i.
type LookupGrad struct {
	DTable, DY Matrix
	IDs        device.Range
	Scratch    device.Range // EmbedScratch bytes
}

// EmbedScratch returns the size of the scratch memory of the backward pass. It holds the
// indices of the rows of DY, sorted by table row, and where those of each table row begin.
func EmbedScratch(rows, vocab int) memory.Bytes { return memory.Bytes(4 * (rows + vocab + 1)) }

// EmbedGrad issues the backward pass of a lookup.
func EmbedGrad(s device.Stream, l LookupGrad) {
	s.Launch(embedSortLaunch(l))
	s.Launch(embedGradLaunch(l))
}

// embedSortLaunch returns the launch that fills Scratch. Its arguments:
//
//	0..1  IDs, Scratch: uint32 [DY.Rows + DTable.Rows + 1]
//	2     DY.Rows | DTable.Rows << 32
func embedSortLaunch(e LookupGrad) device.Launch {
	l := device.NewLaunch(&embedSortKernel, runsOf(e.DTable.Rows, rowThreads), rowThreads)
	passRun(&l, "the numbers of a lookup", e.IDs, e.DY.Rows, 4, device.Read, false)
	passRun(&l, "a lookup's scratch", e.Scratch, e.DY.Rows+e.DTable.Rows+1, 4, device.Write, false)
	l.Arg(packPair(e.DY.Rows, e.DTable.Rows))
	return l
}

// embedGradLaunch returns the launch that adds up what Scratch says. Its arguments:
//
//	0..3  DTable, DY, IDs, Scratch: uint32 [DY.Rows + DTable.Rows + 1]
//	4     DY.Rows | DY.Cols << 32
//	5     pitch of DTable | pitch of DY << 32
//	6     DTable.Rows
//	7     types: bit 0 DTable, 1 DY; set for bf16
//
// A sum is taken in fp32, beginning with the table's number, and stored once.
func embedGradLaunch(e LookupGrad) device.Launch {
	e.DTable.shape("the gradient of embeddings", e.DTable.Rows, e.DY.Cols)
	// A warp has eight columns a lane.
	l := device.NewLaunch(&embedGradKernel, runsOf(e.DY.Rows*runsOf(e.DY.Cols, 8*32), rowThreads/32), rowThreads)
	passMatrix(&l, "the gradient of embeddings", e.DTable, device.Write)
	passMatrix(&l, "the gradient of a lookup", e.DY, device.Read)
	passRun(&l, "the numbers of a lookup", e.IDs, e.DY.Rows, 4, device.Read, false)
	passRun(&l, "a lookup's scratch", e.Scratch, e.DY.Rows+e.DTable.Rows+1, 4, device.Read, false)
	l.Arg(packPair(e.DY.Rows, e.DY.Cols))
	l.Arg(packPair(e.DTable.pitch(), e.DY.pitch()))
	l.Arg(uint64(e.DTable.Rows))
	l.Arg(typeBits(e.DTable, e.DY))
	return l
}
