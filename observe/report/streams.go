// This file owns the work of streams: their spans in a step, and the rate of copies over
// a run.

package report

import (
	"cmp"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/observe/trace"
)

// streams returns the spans of a step by stream, the busiest stream first, and how many
// spans it left out.
func streams(spans []moment, b border) (out []Stream, cut int) {
	var in []moment
	for _, m := range spans {
		if m.at < b.end && m.at+m.Took > b.begin {
			in = append(in, m)
		}
	}
	all, order := shares(in, b)
	if cut = len(in) - mostSpans; cut > 0 {
		slices.SortStableFunc(in, func(a, b moment) int { return cmp.Compare(b.Took, a.Took) })
		in = in[:mostSpans]
	}
	slices.SortStableFunc(in, func(a, b moment) int { return cmp.Compare(a.at, b.at) })
	index := map[string]int{}
	out = []Stream{}
	for i, name := range order {
		index[name] = i
		out = append(out, *all[name])
	}
	names := make([]map[string]int, len(out))
	for i := range names {
		names[i] = map[string]int{}
	}
	for _, m := range in {
		i := index[m.Stream]
		out[i].add(m, names[i])
	}
	return out, max(cut, 0)
}

// shares returns the streams of a step, the busiest first, with the share of the step
// that each worked and waited.
func shares(in []moment, b border) (all map[string]*Stream, order []string) {
	all = map[string]*Stream{}
	length := float64(max(1, b.end-b.begin))
	for _, m := range in {
		s := all[m.Stream]
		if s == nil {
			s = &Stream{Name: m.Stream, Names: []string{}, Begin: []float64{}, Took: []float64{}, What: []string{}, Of: []int{}, Bytes: []int64{}}
			all[m.Stream], order = s, append(order, m.Stream)
		}
		part := float64(min(m.at+m.Took, b.end)-max(m.at, b.begin)) / length
		if m.Kind == trace.Wait {
			s.Waits += part
		} else {
			s.Busy += part
		}
	}
	slices.SortStableFunc(order, func(a, b string) int { return cmp.Compare(all[b].Busy, all[a].Busy) })
	for _, s := range all {
		s.Busy, s.Waits = round(s.Busy), round(s.Waits)
	}
	return all, order
}

// add appends a span.
func (s *Stream) add(m moment, names map[string]int) {
	of := -1
	if m.Name != "" {
		i, ok := names[m.Name]
		if !ok {
			i = len(s.Names)
			names[m.Name], s.Names = i, append(s.Names, m.Name)
		}
		of = i
	}
	s.Begin, s.Took = append(s.Begin, millis(m.at)), append(s.Took, millis(m.Took))
	s.What, s.Of, s.Bytes = append(s.What, m.Kind.String()), append(s.Of, of), append(s.Bytes, m.Bytes)
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
	var copies []moment
	for _, m := range l.spans {
		if m.Kind == trace.Copy && m.Bytes > 0 && (outward[baseName(m.Stream)] || inward[baseName(m.Stream)]) {
			copies = append(copies, m)
		}
	}
	if len(copies) == 0 || l.end <= 0 {
		return r
	}
	width := float64(l.end) / rateSlots
	var sums [2][rateSlots]float64
	for _, m := range copies {
		from, to := float64(m.at)/width, float64(m.at+max(m.Took, 1))/width
		for k := max(0, int(from)); k < rateSlots && float64(k) < to; k++ {
			share := (min(to, float64(k+1)) - max(from, float64(k))) / (to - from)
			if outward[baseName(m.Stream)] {
				sums[0][k] += share * float64(m.Bytes)
			} else {
				sums[1][k] += share * float64(m.Bytes)
			}
		}
	}
	for k := range rateSlots {
		r.Time = append(r.Time, millis(int64(float64(k)*width)))
		r.Out = append(r.Out, float64(int64(sums[0][k]/width*1e9)))
		r.In = append(r.In, float64(int64(sums[1][k]/width*1e9)))
	}
	return r
}
