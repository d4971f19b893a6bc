// This file owns the work of streams: their spans in a step, and the rate of copies over
// a run.

package report

import (
	"cmp"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/observe/trace"
)

// piece is a span of a step.
type piece struct {
	at, took, bytes int64
	stream, name    string
	kind            trace.Kind
}

// work collects the spans of a step.
type work struct {
	border
	in    []piece
	count int
	all   map[string]*Stream
	order []string // streams as they come
}

// add adds a span, if it lies in the step.
func (w *work) add(m moment) {
	if m.at >= w.end || m.at+m.Took <= w.begin {
		return
	}
	w.count++
	w.in = append(w.in, piece{m.at, m.Took, m.Bytes, m.Stream, m.Name, m.Kind})
	if len(w.in) == 4*mostSpans {
		w.cut()
	}
	s := w.all[m.Stream]
	if s == nil {
		s = &Stream{Name: m.Stream, Names: []string{}, Begin: []float64{}, Took: []float64{}, What: []string{}, Of: []int{}, Bytes: []int64{}}
		w.all[m.Stream], w.order = s, append(w.order, m.Stream)
	}
	part := float64(min(m.at+m.Took, w.end)-max(m.at, w.begin)) / float64(max(1, w.end-w.begin))
	if m.Kind == trace.Wait {
		s.Waits += part
	} else {
		s.Busy += part
	}
}

// cut keeps the longest spans.
func (w *work) cut() {
	if len(w.in) > mostSpans {
		slices.SortStableFunc(w.in, func(a, b piece) int { return cmp.Compare(b.took, a.took) })
		w.in = w.in[:mostSpans]
	}
}

// streams returns the spans by stream, the busiest stream first, and how many spans it
// left out.
func (w *work) streams() (out []Stream, cut int) {
	w.cut()
	slices.SortStableFunc(w.in, func(a, b piece) int { return cmp.Compare(a.at, b.at) })
	slices.SortStableFunc(w.order, func(a, b string) int { return cmp.Compare(w.all[b].Busy, w.all[a].Busy) })
	index := map[string]int{}
	out = []Stream{}
	for i, name := range w.order {
		index[name] = i
		s := *w.all[name]
		s.Busy, s.Waits = round(s.Busy), round(s.Waits)
		out = append(out, s)
	}
	names := make([]map[string]int, len(out))
	for i := range names {
		names[i] = map[string]int{}
	}
	for _, m := range w.in {
		i := index[m.stream]
		out[i].add(m, names[i])
	}
	return out, max(w.count-mostSpans, 0)
}

// add appends a span.
func (s *Stream) add(m piece, names map[string]int) {
	of := -1
	if m.name != "" {
		i, ok := names[m.name]
		if !ok {
			i = len(s.Names)
			names[m.name], s.Names = i, append(s.Names, m.name)
		}
		of = i
	}
	s.Begin, s.Took = append(s.Begin, millis(m.at)), append(s.Took, millis(m.took))
	s.What, s.Of, s.Bytes = append(s.What, m.kind.String()), append(s.Of, of), append(s.Bytes, m.bytes)
}

// round cuts a share to four digits.
func round(x float64) float64 { return float64(int64(x*1e4+0.5)) / 1e4 }

// rateSlots is the number of samples of the rates of copies.
const rateSlots = 1000

// The streams that offload and reload. A span says where a copy goes but not where it
// comes from, and other streams copy within the device or read results.
var (
	outward = map[string]bool{"offload": true, "plain out": true, "bench out": true}
	inward  = map[string]bool{"reload": true, "plain in": true, "bench in": true}
)

// baseName returns the name of a stream without the number that a device adds if
// several streams have one name.
func baseName(stream string) string {
	return strings.TrimSuffix(strings.TrimRight(stream, "0123456789"), " ")
}

// rates returns the rates of offloads and reloads over time. The bytes of a copy are
// spread over its duration.
func rates(l *timeline) Rates {
	r := Rates{Time: []float64{}, Out: []float64{}, In: []float64{}}
	if l.end <= 0 {
		return r
	}
	width := float64(l.end) / rateSlots
	var sums [2][rateSlots]float64
	copies := 0
	l.eachSpan(func(m moment) {
		if m.Kind != trace.Copy || m.Bytes <= 0 || !outward[baseName(m.Stream)] && !inward[baseName(m.Stream)] {
			return
		}
		copies++
		from, to := float64(m.at)/width, float64(m.at+max(m.Took, 1))/width
		for k := max(0, int(from)); k < rateSlots && float64(k) < to; k++ {
			share := (min(to, float64(k+1)) - max(from, float64(k))) / (to - from)
			if outward[baseName(m.Stream)] {
				sums[0][k] += share * float64(m.Bytes)
			} else {
				sums[1][k] += share * float64(m.Bytes)
			}
		}
	})
	if copies == 0 {
		return r
	}
	for k := range rateSlots {
		r.Time = append(r.Time, millis(int64(float64(k)*width)))
		r.Out = append(r.Out, float64(int64(sums[0][k]/width*1e9)))
		r.In = append(r.In, float64(int64(sums[1][k]/width*1e9)))
	}
	return r
}
